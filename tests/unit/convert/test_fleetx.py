"""PaddleFleetX's checkpoints: written here as its models name and cut their parameters, and run as they compute."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
import yaml

from ppfleetx.checkpoint.fingerprint import fingerprint
from ppfleetx.checkpoint.inspect import faults
from ppfleetx.checkpoint.reader import Checkpoint
from ppfleetx.config.errors import UserError
from ppfleetx.convert.converted import model_config
from ppfleetx.convert.fleetx import from_fleetx, logical_name, model_section
from tests.unit.models.test_gpt import make

GOLDEN = Path(__file__).resolve().parents[2] / "golden/fleetx_yaml"
H, HEADS, LAYERS, VOCAB, FFN, POSITIONS = 12, 2, 4, 21, 20, 6
MODEL = {
    "module": "GPTModule", "name": "GPT", "vocab_size": VOCAB, "vocab_size_divisible_unit": 4, "hidden_size": H,
    "num_layers": LAYERS, "num_attention_heads": HEADS, "ffn_hidden_size": FFN, "max_position_embeddings": POSITIONS,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "type_vocab_size": 16, "use_recompute": True,
    "no_recompute_layers": None, "virtual_pp_degree": 1, "sequence_parallel": False, "fused_linear": False,
}  # fmt: skip
COLUMN, ROW = ("qkv_proj", "q_proj", "k_proj", "v_proj", "linear1"), ("out_proj", "linear2")


def single(rows=24, fused=True, seed=0):
    """The state dict of GPTForPretraining with random values: names and shapes as in its source."""
    random = np.random.default_rng(seed)
    inputs = {"qkv_proj": (H, 3 * H)} if fused else dict.fromkeys(("q_proj", "k_proj", "v_proj"), (H, H))
    linears = {**{f"self_attn.{name}": shape for name, shape in inputs.items()}, "self_attn.out_proj": (H, H)}
    linears |= {"linear1": (H, FFN), "linear2": (FFN, H)}
    shapes = {
        "gpt.embeddings.word_embeddings.weight": (rows, H),
        "gpt.embeddings.position_embeddings.weight": (POSITIONS, H),
    }
    for number in range(LAYERS):
        path = f"gpt.decoder.layers.{number}"
        for name, shape in linears.items():
            shapes |= {f"{path}.{name}.weight": shape, f"{path}.{name}.bias": shape[1:]}
        for name in ("norm1", "norm2"):
            shapes |= {f"{path}.{name}.weight": (H,), f"{path}.{name}.bias": (H,)}
    shapes |= {"gpt.decoder.norm.weight": (H,), "gpt.decoder.norm.bias": (H,)}
    return {name: random.normal(0.1, 0.4, shape).astype("float32") for name, shape in shapes.items()}


def tensor_part(name, value, rank, degree):
    """What tensor rank `rank` holds, by the class of the layer: column and row parallel linears, parallel embedding."""
    layer, kind = name.split(".")[-2:]
    if layer in COLUMN:
        return np.split(value, degree, -1)[rank]
    if layer == "word_embeddings" or (layer in ROW and kind == "weight"):
        return np.split(value, degree, 0)[rank]
    return value


def stages(state, pp, vpp=1):
    """The state dicts of the stages of GPTForPretrainingPipe, [embedding, block × 4, norm, head], as PipelineLayer names
    them. Its last stage has position embeddings of its own, which nothing trains."""
    per = LAYERS // (pp * vpp)
    edges = [0, *(1 + per * chunk for chunk in range(1, pp * vpp)), LAYERS + 2]
    found = []
    for stage in range(pp):
        held = {}
        for chunk in range(stage, pp * vpp, pp):
            start, stop = edges[chunk], edges[chunk + 1]
            for name, value in state.items():
                place = (
                    0 if "embeddings" in name
                    else LAYERS + 1 if "decoder.norm" in name
                    else 1 + int(name.split(".")[3])
                )  # fmt: skip
                if start <= place < stop and place:
                    inside = name.split("decoder.")[1] if place > LAYERS else name.split(".", 4)[4]
                    where = f"{start}.{place - start}" if vpp > 1 else f"{place}"
                    held[f"_layers.{where}.{inside}"] = value
        if stage in (0, pp - 1):
            for kind in ("word", "position"):
                value = state[f"gpt.embeddings.{kind}_embeddings.weight"]
                own = value + 5 if stage and kind == "position" else value
                held[f"_layers.shared_layers.embed.{kind}_embeddings.weight"] = own
                if vpp > 1:
                    place = "0.0" if stage == 0 else f"{edges[-2]}.embed"
                    held[f"_layers.{place}.{kind}_embeddings.weight"] = own
        found.append(held)
    return found


def save(folder, state):
    folder.mkdir(parents=True, exist_ok=True)
    paddle.save({name: paddle.to_tensor(value) for name, value in state.items()}, str(folder / "model.pdparams"))
    (folder / "model_state.pdopt").touch()
    (folder / "meta_state.pdopt").touch()


def save_parallel(folder, state, mp=1, pp=1, vpp=1, sharding=1, prefix="_layers."):
    for stage, rank, shard in itertools.product(range(pp), range(mp), range(sharding)):
        held = stages(state, pp, vpp)[stage] if pp > 1 else {prefix + name: value for name, value in state.items()}
        part = {name: tensor_part(name, value, rank, mp) for name, value in held.items()}
        save(folder / f"mp_{rank:02d}_sharding_{shard:02d}_pp_{stage:02d}", part)


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "fleetx.yaml"
    file.write_text(
        yaml.safe_dump({"Global": {"local_batch_size": 8}, "Model": MODEL, "Distributed": {"mp_degree": 2}})
    )
    return [str(file)]


def refusal(tmp_path, config, *told, overrides=()):
    with pytest.raises(UserError) as caught:
        from_fleetx(tmp_path / "theirs", tmp_path / "out", config, overrides)
    for words in told:
        assert words in str(caught.value), str(caught.value)
    assert not any("out" in path.name for path in tmp_path.iterdir())


def their_logits(state, ids, fused):
    """GPTForPretraining in evaluation mode, as its source computes: ids [b, s] → [b, s, V]."""
    get = {name: paddle.to_tensor(value) for name, value in state.items()}
    x = F.embedding(paddle.to_tensor(ids), get["gpt.embeddings.word_embeddings.weight"])
    x = x + get["gpt.embeddings.position_embeddings.weight"][: ids.shape[1]]
    mask = paddle.triu(paddle.ones([ids.shape[1]] * 2) * -1e4, diagonal=1)

    def linear(name, x):
        return F.linear(x, get[f"{name}.weight"], get[f"{name}.bias"])

    def norm(name, x):
        return F.layer_norm(x, [H], get[f"{name}.weight"], get[f"{name}.bias"], 1e-5)

    for number in range(LAYERS):
        path = f"gpt.decoder.layers.{number}"
        y = norm(f"{path}.norm1", x)
        if fused:
            mixed = (
                linear(f"{path}.self_attn.qkv_proj", y).reshape([0, 0, HEADS, 3 * H // HEADS]).transpose([0, 2, 1, 3])
            )
            q, k, v = paddle.split(mixed, 3, axis=-1)
        else:
            q, k, v = (
                linear(f"{path}.self_attn.{one}_proj", y).reshape([0, 0, HEADS, H // HEADS]).transpose([0, 2, 1, 3])
                for one in "qkv"
            )
        weights = F.softmax(paddle.matmul(q * (H // HEADS) ** -0.5, k, transpose_y=True) + mask)
        y = paddle.matmul(weights, v).transpose([0, 2, 1, 3])
        x = x + linear(f"{path}.self_attn.out_proj", y.reshape([0, 0, H]))
        y = F.gelu(linear(f"{path}.linear1", norm(f"{path}.norm2", x)), approximate=True)
        x = x + linear(f"{path}.linear2", y)
    return paddle.matmul(
        norm("gpt.decoder.norm", x), get["gpt.embeddings.word_embeddings.weight"], transpose_y=True
    ).numpy()


@pytest.mark.parametrize("fused", [True, False])
def test_logits_are_those_of_their_model(tmp_path, config, fused):
    state = single(fused=fused)
    save(tmp_path / "theirs", state)
    notes = from_fleetx(tmp_path / "theirs", tmp_path / "out", config)
    assert any("rows 21 to 23 are vocabulary padding" in note for note in notes)
    assert any("optimizer states (model_state.pdopt, 1 file)" in note for note in notes)
    saved = Checkpoint(tmp_path / "out")
    assert faults(tmp_path / "out") == [] and saved.shapes()["embedding.word.weight"] == (21, H)
    _, model, parameters = make(
        *(f"Model.{key}={value}" for key, value in yaml.safe_load((tmp_path / "out/model.yaml").read_text())["Model"].items()),
        f"Data.Train.dataset.max_seq_len={POSITIONS}", "Data.Eval=null",
    )  # fmt: skip
    for parameter in parameters.values():
        parameter.set_value(saved.read_piece(parameter.spec, parameter.spec.box(), None).reshape(parameter.spec.shape))
    model.eval()
    ids = np.random.default_rng(3).integers(0, VOCAB, (2, POSITIONS))
    found = model(paddle.to_tensor(ids)).transpose([1, 0, 2]).numpy()[..., :VOCAB]
    right = their_logits(state, ids, fused)[..., :VOCAB]
    assert np.abs(right).max() > 1
    np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-5)


LAYOUTS = {
    "mp2": {"mp": 2},
    "sharding2": {"sharding": 2, "prefix": "_layer."},
    "dp2": {"prefix": ""},
    "pp2": {"pp": 2},
    "mp2pp2": {"mp": 2, "pp": 2},
    "pp2vpp2": {"pp": 2, "vpp": 2, "sharding": 2},
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("fused", [True, False])
def test_every_layout_gives_the_same_weights(tmp_path, config, name, fused):
    state = single(fused=fused)
    save(tmp_path / "one", state)
    save_parallel(tmp_path / "many", state, **LAYOUTS[name])
    from_fleetx(tmp_path / "one", tmp_path / "a", config)
    from_fleetx(tmp_path / "many", tmp_path / "b", config)
    a, b = Checkpoint(tmp_path / "a"), Checkpoint(tmp_path / "b")
    assert fingerprint(a) == fingerprint(b)
    files = LAYOUTS[name].get("mp", 1) * LAYOUTS[name].get("pp", 1)
    assert len(b.manifest.files) == files


def test_half_precision_keeps_its_bits(tmp_path, config):
    state = {name: value.astype("float16") for name, value in single().items()}
    save(tmp_path / "theirs", state)
    from_fleetx(tmp_path / "theirs", tmp_path / "out", config)
    saved = Checkpoint(tmp_path / "out")
    assert {entry.dtype for entry in saved.manifest.entries} == {"F16"}
    assert np.array_equal(saved.read_whole("norm.bias"), state["gpt.decoder.norm.bias"])


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("gpt.embeddings.word_embeddings.weight", "embedding.word.weight"),
        ("_layers.gpt.embeddings.position_embeddings.weight", "embedding.position.weight"),
        ("gpt.decoder.layers.3.self_attn.qkv_proj.bias", "blocks.3.attention.qkv.bias"),
        ("_layers.gpt.decoder.layers.11.linear2.weight", "blocks.11.mlp.down.weight"),
        ("_layers.1.norm1.weight", "blocks.0.norm1.weight"),
        ("_layers.24.self_attn.out_proj.weight", "blocks.23.attention.out.weight"),
        ("_layers.25.norm.bias", "norm.bias"),
        ("_layers.13.2.linear1.weight", "blocks.14.mlp.up.weight"),  # place 13 + 2 of the list, after the embedding
        ("_layers.19.6.norm.weight", "norm.weight"),
        ("_layers.19.embed.word_embeddings.weight", "embedding.word.weight"),
        ("_layers.25.weight", "norm.weight"),  # versions of 2022: the element is the LayerNorm itself
        ("_layers.19.6.bias", "norm.bias"),
        ("_layers.3.norm.bias", None),
        ("_layers.3.bias", None),
        ("gpt.decoder.layers.0.moe_mlp.gate.gate.weight", None),
        ("score.weight", None),
    ],
)
def test_names(key, name):
    """Of a model of 24 blocks, under every wrapper."""
    assert logical_name(key, 24) == name


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("345M_single_card", (24, 1024, 16, 50304)),
        ("1.3B_dp8", (24, 2048, 16, 50304)),
        ("6.7B_sharding16", (32, 4096, 32, 50304)),
        ("13B_dp8", (40, 5120, 40, 50432)),
        ("175B_mp8_pp16", (96, 12288, 96, 51200)),
    ],
)
def test_their_own_files_tell_the_model(name, sizes):
    """Whatever number of processes they are for."""
    model = model_config(model_section([str(GOLDEN / f"pretrain_gpt_{name}.yaml")])).Model
    assert (model.num_layers, model.hidden_size, model.num_attention_heads, model.vocab_size) == sizes


def test_another_model_than_the_yaml_says(tmp_path, config):
    save(tmp_path / "theirs", single())
    told = (
        "model.pdparams",
        "gpt.decoder.layers.0.linear1.weight is float32 [12, 20]",
        "blocks.0.mlp.up.weight has [12, 24]",
    )
    refusal(tmp_path, config, *told, overrides=["Model.ffn_hidden_size=24"])
    refusal(
        tmp_path,
        config,
        "lacks gpt.decoder.layers.3.self_attn.qkv_proj.weight [12, 36]",
        overrides=["Model.num_layers=3"],
    )
    refusal(tmp_path, config, "the model needs and the files lack", "and 11 more", overrides=["Model.num_layers=5"])
    refusal(tmp_path, config, "embedding.word.weight has [28, 12]", overrides=["Model.vocab_size=25"])
    refusal(tmp_path, config, "did you mean Model.hidden_size", overrides=["Model.hiden_size=3"])
    refusal(tmp_path, config, "Model.name = 'Llama'", "are of GPT", overrides=["Model.name=Llama"])


def test_two_checkpoints_in_one_folder(tmp_path, config):
    """A run of one card and one of several had the same output_dir: nothing tells which is meant."""
    save(tmp_path / "theirs", single())
    save_parallel(tmp_path / "theirs", single(seed=1), mp=2)
    refusal(tmp_path, config, "two checkpoints", "mp_00_sharding_00_pp_00")


def test_a_missing_part(tmp_path, config):
    save_parallel(tmp_path / "theirs", single(), mp=2, pp=2)
    (tmp_path / "theirs/mp_01_sharding_00_pp_00/model.pdparams").unlink()
    refusal(tmp_path, config, "of mp 2 × pp 2, and mp_01_sharding_00_pp_00/model.pdparams is missing")


def test_any_rank_of_a_sharding_group_will_do(tmp_path, config):
    save(tmp_path / "one", single())
    save_parallel(tmp_path / "many", single(), mp=2, sharding=2)
    (tmp_path / "many/mp_00_sharding_00_pp_00/model.pdparams").unlink()
    shutil.rmtree(tmp_path / "many/mp_01_sharding_00_pp_00")
    from_fleetx(tmp_path / "one", tmp_path / "a", config)
    from_fleetx(tmp_path / "many", tmp_path / "b", config)
    assert fingerprint(Checkpoint(tmp_path / "a")) == fingerprint(Checkpoint(tmp_path / "b"))


def test_a_part_of_which_one_rank_lacks_a_parameter(tmp_path, config):
    state = single()
    save_parallel(tmp_path / "theirs", state, mp=2)
    part = {f"_layers.{name}": tensor_part(name, value, 1, 2) for name, value in state.items()}
    del part["_layers.gpt.decoder.layers.2.linear1.weight"]
    save(tmp_path / "theirs/mp_01_sharding_00_pp_00", part)
    refusal(tmp_path, config, "blocks.2.mlp.up.weight of shape [12, 20] has 120 elements")


def test_where_it_was_looked_for(tmp_path, config):
    refusal(tmp_path, config, "there is no such folder")
    save(tmp_path / "theirs/epoch_0_step_10", single())
    refusal(tmp_path, config, "it holds epoch_0_step_10: name one of them")
    with pytest.raises(UserError, match="its folder is wanted"):
        from_fleetx(tmp_path / "theirs/epoch_0_step_10/model.pdparams", tmp_path / "out", config)


def test_a_malicious_file_leaves_nothing(tmp_path, config, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/model.pdparams").write_bytes(b"cos\nsystem\n(S'touch MARK'\ntR.")
    refusal(tmp_path, config, "it asks for os.system")
    assert not (tmp_path / "MARK").exists()
