"""Hugging Face folders, both ways; what cannot be read is refused by name. The numbers: test_hf_transformers.py."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file
from safetensors.paddle import load_file as load_file_paddle

from ppfleetx.checkpoint import stream
from ppfleetx.checkpoint.fingerprint import fingerprint
from ppfleetx.checkpoint.inspect import faults
from ppfleetx.checkpoint.layout import stored_shapes
from ppfleetx.checkpoint.reader import Checkpoint
from ppfleetx.checkpoint.shards import Damaged
from ppfleetx.config.errors import UserError
from ppfleetx.config.load import load_tree
from ppfleetx.convert import hf, hf_files
from ppfleetx.convert.converted import model_config
from ppfleetx.convert.hf import from_hf, to_hf
from ppfleetx.models.gpt import hf as gpt
from ppfleetx.models.registry import parameters
from tests.unit.checkpoint.written import bfloat16, random_arrays, write_checkpoint

MODEL = {
    "name": "GPT",
    "vocab_size": 30,
    "hidden_size": 8,
    "num_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 5,
    "ffn_hidden_size": 12,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.25,
    "initializer_range": 0.05,
}
CONFIG = gpt.to_config(MODEL)


def ours(folder, dtype="float32", parts=2, dim=1, model=MODEL):
    """A checkpoint of a GPT with random weights."""
    config = model_config(model)
    specs = [spec for spec in parameters(config).values() if not spec.tied_to]
    shapes = {name: shape for spec in specs for name, shape in stored_shapes(spec).items()}
    arrays = random_arrays(*((name, shape, "float32") for name, shape in shapes.items()))
    arrays = {name: bfloat16(one) if dtype == "bfloat16" else one.astype(dtype) for name, one in arrays.items()}
    return write_checkpoint(folder, arrays, parts, dim, run={"config": yaml.safe_load(config.to_yaml())})


def theirs(folder, change=lambda tensors: None, prefix="transformer.", **config):
    """A GPT-2 folder with random weights, changed in some way."""
    to_hf(ours(folder / "ours"), folder / "plain")
    tensors = {
        name.replace("transformer.", prefix): one for name, one in load_file(folder / "plain" / hf.WEIGHTS).items()
    }
    change(tensors)
    (folder / "hf").mkdir()
    save_file(tensors, folder / "hf" / hf.WEIGHTS)
    (folder / "hf/config.json").write_text(json.dumps({**CONFIG, **config}))
    return folder / "hf"


def refusal(folder, *told):
    """The refusal of a folder of theirs, which leaves nothing."""
    with pytest.raises(UserError) as caught:
        from_hf(folder, folder.parent / "out")
    text = str(caught.value)
    for words in told:
        assert words in text, text
    assert not any("out" in path.name for path in folder.parent.iterdir())
    return caught.value.problems


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("max_shard_bytes", [hf.MAX_SHARD_BYTES, 700])
def test_round_trip_to_the_bit(tmp_path, monkeypatch, dtype, max_shard_bytes):
    monkeypatch.setattr(hf, "PIECE_BYTES", 100)
    saved = ours(tmp_path / "ours", dtype)
    files = to_hf(saved, tmp_path / "hf", max_shard_bytes)
    assert sorted(files) == sorted(path.name for path in (tmp_path / "hf").iterdir())
    assert len(files) == 2 if max_shard_bytes > 700 else len(files) > 4
    assert json.loads((tmp_path / "hf/config.json").read_text())["torch_dtype"] == dtype
    assert from_hf(tmp_path / "hf", tmp_path / "back") == []
    back = Checkpoint(tmp_path / "back")
    assert faults(tmp_path / "back") == []
    assert fingerprint(back).weights == fingerprint(saved).weights
    assert yaml.safe_load((tmp_path / "back/model.yaml").read_text()) == {"Model": MODEL}
    assert back.manifest.run["config"]["Model"]["ffn_hidden_size"] == 12


def test_names_shapes_and_fused_query_key_value(tmp_path):
    saved = ours(tmp_path / "ours")
    to_hf(saved, tmp_path / "hf")
    found = load_file(tmp_path / "hf" / hf.WEIGHTS)
    block = {
        "ln_1": (8,), "attn.c_attn": (8, 24), "attn.c_proj": (8, 8), "ln_2": (8,), "mlp.c_fc": (8, 12), "mlp.c_proj": (12, 8)
    }  # fmt: skip
    shapes = {"transformer.wte.weight": (30, 8), "transformer.wpe.weight": (5, 8)}
    for path, shape in {**{f"h.{n}.{k}": s for n in (0, 1) for k, s in block.items()}, "ln_f": (8,)}.items():
        shapes |= {f"transformer.{path}.weight": shape, f"transformer.{path}.bias": shape[-1:]}
    assert {name: one.shape for name, one in found.items()} == shapes
    for kind in ("weight", "bias"):
        three = [saved.read_whole(f"blocks.1.attention.{part}.{kind}") for part in "qkv"]
        assert np.array_equal(found[f"transformer.h.1.attn.c_attn.{kind}"], np.concatenate(three, axis=-1))


def test_shards_keep_to_the_limit_and_the_index_is_right(tmp_path):
    to_hf(ours(tmp_path / "ours"), tmp_path / "hf", 900)
    index = json.loads((tmp_path / "hf" / hf_files.INDEX).read_text())
    files = sorted({*index["weight_map"].values()})
    assert files == [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    total = 0
    for name in files:
        inside = load_file(tmp_path / "hf" / name)
        size = sum(one.nbytes for one in inside.values())
        assert size <= 900 or len(inside) == 1
        assert {index["weight_map"][key] for key in inside} == {name}
        total += size
    assert total == index["metadata"]["total_size"]


def turned_form():
    """The GPT family as if its matrices were torch's Linear: [out, in]."""
    links = [
        replace(link, transposed=".h." in link.theirs and link.theirs.endswith("weight")) for link in gpt.links(MODEL)
    ]
    links = [replace(link, transposed=link.transposed and "ln_" not in link.theirs) for link in links]
    names = ("MODEL_TYPE", "NAMES", "PREFIX", "NO_WEIGHTS", "tied", "to_config", "from_config")
    return SimpleNamespace(links=lambda model: links, **{name: getattr(gpt, name) for name in names})


def test_a_family_whose_matrices_lie_transposed(tmp_path, monkeypatch):
    saved = ours(tmp_path / "ours")
    to_hf(saved, tmp_path / "plain")
    monkeypatch.setattr(hf, "FORMS", (turned_form(),))
    monkeypatch.setattr(hf, "PIECE_BYTES", 70)
    to_hf(saved, tmp_path / "turned")
    plain, turned = (load_file(tmp_path / name / hf.WEIGHTS) for name in ("plain", "turned"))
    assert turned["transformer.h.0.attn.c_attn.weight"].shape == (24, 8)
    for name, value in turned.items():
        is_turned = ".h." in name and value.ndim == 2
        assert np.array_equal(value, plain[name].T if is_turned else plain[name]), name
    from_hf(tmp_path / "turned", tmp_path / "back")
    assert fingerprint(Checkpoint(tmp_path / "back")).weights == fingerprint(saved).weights


def test_files_of_the_bare_model_with_masks_and_a_copy_of_the_head(tmp_path):
    """As the published gpt2 is: no prefix, masks as tensors; other exporters repeat the tied head."""

    def change(tensors):
        for number in (0, 1):
            tensors[f"h.{number}.attn.bias"] = np.tril(np.ones((1, 1, 5, 5), np.uint8))
            tensors[f"h.{number}.attn.masked_bias"] = np.float32([-1e4])
        tensors["lm_head.weight"] = tensors["wte.weight"].copy()

    folder = theirs(tmp_path, change, prefix="")
    assert from_hf(folder, tmp_path / "back") == []
    assert fingerprint(Checkpoint(tmp_path / "back")).weights == fingerprint(Checkpoint(tmp_path / "ours")).weights


def test_padded_vocabulary_is_cut_and_said(tmp_path):
    def pad(tensors):
        word = tensors["transformer.wte.weight"]
        tensors["transformer.wte.weight"] = np.concatenate([word, np.full((2, 8), 7, np.float32)])

    folder = theirs(tmp_path, pad)
    (note,) = from_hf(folder, tmp_path / "back")
    assert "transformer.wte.weight: rows 30 to 31 are dropped" in note
    assert fingerprint(Checkpoint(tmp_path / "back")).weights == fingerprint(Checkpoint(tmp_path / "ours")).weights


def test_another_embedding_dropout_is_said(tmp_path):
    (note,) = from_hf(theirs(tmp_path, embd_pdrop=0.5), tmp_path / "back")
    assert note.startswith("embd_pdrop 0.5 is dropped: Model.hidden_dropout_prob 0.0")


def test_missing_and_extra_tensors_are_named_with_shapes(tmp_path):
    def change(tensors):
        del tensors["transformer.ln_f.bias"], tensors["transformer.h.1.mlp.c_fc.weight"]
        tensors["transformer.h.0.crossattention.c_attn.weight"] = np.zeros((8, 16), np.float32)

    lacks, more = refusal(theirs(tmp_path, change))
    assert "lack transformer.h.1.mlp.c_fc.weight [8, 12], transformer.ln_f.bias [8]" in str(lacks)
    assert "the model lacks transformer.h.0.crossattention.c_attn.weight [8, 16]" in str(more)


def test_a_model_with_fewer_layers_than_config_says(tmp_path):
    (problem,) = refusal(theirs(tmp_path, n_layer=4))
    assert problem.rule.endswith("and 19 more") and "transformer.h.2.ln_1.weight [8]" in problem.rule


def test_transposed_and_misshapen_tensors(tmp_path):
    def change(tensors):
        tensors["transformer.h.0.mlp.c_fc.weight"] = np.ascontiguousarray(tensors["transformer.h.0.mlp.c_fc.weight"].T)
        tensors["transformer.wpe.weight"] = np.zeros((9, 8), np.float32)
        tensors["transformer.wte.weight"] = np.zeros((29, 8), np.float32)

    problems = refusal(theirs(tmp_path, change))
    texts = {problem.key: str(problem) for problem in problems}
    assert len(texts) == 3
    assert (
        "[12, 8]" in texts["transformer.h.0.mlp.c_fc.weight"]
        and "transpose" in texts["transformer.h.0.mlp.c_fc.weight"]
    )
    assert "[9, 8]" in texts["transformer.wpe.weight"] and "[5, 8]" in texts["transformer.wpe.weight"]
    assert "[29, 8]" in texts["transformer.wte.weight"] and "[30, 8]" in texts["transformer.wte.weight"]


def test_a_head_of_its_own_is_refused(tmp_path):
    def change(tensors):
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"].copy()
        tensors["lm_head.weight"][29, 7] += 1

    refusal(theirs(tmp_path, change), "lm_head.weight", "ties it to transformer.wte.weight")


def test_quantised_weights_are_refused(tmp_path):
    def change(tensors):
        tensors["transformer.h.0.mlp.c_fc.weight"] = np.zeros((8, 12), np.int8)

    refusal(theirs(tmp_path, change), "type I8", "not quantised")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"activation_function": "gelu"}, "activation_function = 'gelu'"),
        ({"activation_function": "relu"}, "gelu_new"),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon = 1e-05 or"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings = True only"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({"scale_attn_weights": False}, "scale_attn_weights"),
        ({"add_cross_attention": True}, "add_cross_attention"),
        ({"n_embd": None}, "config.json: n_embd"),
        ({"n_head": 3}, "Model.num_attention_heads"),
        ({"model_type": "bloom"}, "models that can be converted: gpt2, llama"),
        ({"model_type": ["gpt2"]}, "models that can be converted: gpt2, llama"),
        ({"resid_pdrop": None}, "resid_pdrop"),
        ({"attn_pdrop": "none"}, "attn_pdrop"),
        ({"embd_pdrop": True}, "embd_pdrop"),
        ({"initializer_range": [0.02]}, "initializer_range"),
        ({"n_inner": 0}, "Model.ffn_hidden_size"),
    ],
)
def test_what_we_do_not_compute_is_refused_by_name(tmp_path, change, told):
    refusal(theirs(tmp_path, **change), told)


def test_all_missing_keys_of_config_are_told_together(tmp_path):
    folder = theirs(tmp_path)
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_embd": 8}))
    problems = refusal(folder)
    assert [p.key.split(": ")[1] for p in problems] == ["vocab_size", "n_layer", "n_head", "n_positions"]
    assert all(problem.rule == "config.json lacks it" for problem in problems)


def test_keys_that_config_leaves_out_have_their_defaults(tmp_path):
    folder = theirs(tmp_path)
    sizes = {
        name: CONFIG[name]
        for name in ("model_type", "vocab_size", "n_embd", "n_layer", "n_head", "n_positions", "n_inner")
    }
    (folder / "config.json").write_text(json.dumps({**sizes, "activation_function": "gelu_pytorch_tanh"}))
    assert from_hf(folder, tmp_path / "back") == []
    model = Checkpoint(tmp_path / "back").manifest.run["config"]["Model"]
    dropouts = (model["hidden_dropout_prob"], model["attention_probs_dropout_prob"])
    assert dropouts == (0.1, 0.1) and model["initializer_range"] == 0.02


def test_an_index_that_names_a_missing_file(tmp_path):
    to_hf(ours(tmp_path / "ours"), tmp_path / "hf", 900)
    files = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    gone = tmp_path / "hf" / files[1]
    count = len(load_file(gone))
    gone.unlink()
    refusal(tmp_path / "hf", gone.name, f"this file is missing, with {count} tensors")


def test_one_file_goes_before_an_index(tmp_path):
    """As in transformers: a model saved again as one file, where the shards of an earlier one still lie."""
    to_hf(ours(tmp_path / "old"), tmp_path / "hf", 900)
    folder = theirs(tmp_path / "new", lambda tensors: tensors["transformer.ln_f.bias"].fill(7))
    (folder / hf_files.SINGLE).rename(tmp_path / "hf" / hf_files.SINGLE)
    from_hf(tmp_path / "hf", tmp_path / "back")
    assert Checkpoint(tmp_path / "back").read_whole("norm.bias").tolist() == [7] * 8


def test_a_pointer_of_git_lfs_is_called_one(tmp_path):
    folder = theirs(tmp_path)
    text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 548105171\n"
    (folder / hf_files.SINGLE).write_text(text)
    with pytest.raises(Damaged, match="git lfs pull"):
        from_hf(folder, tmp_path / "out")


def test_the_section_holds_over_a_config_of_another_model(tmp_path):
    """n_inner null is 4 × n_embd = 32, whatever the run's own config says."""
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"Model": {**MODEL, "ffn_hidden_size": 99}}))
    for inner, expected in ((None, 32), (12, 12)):
        (tmp_path / "model.yaml").write_text(
            yaml.safe_dump({"Model": gpt.from_config({**CONFIG, "n_inner": inner}).model})
        )
        tree, _ = load_tree([str(tmp_path / name) for name in ("run.yaml", "model.yaml")], [])
        assert tree["Model"]["ffn_hidden_size"] == expected


def test_an_epsilon_that_went_through_float32(tmp_path):
    assert float(np.float32(1e-5)) == 9.999999747378752e-06
    assert from_hf(theirs(tmp_path, layer_norm_epsilon=float(np.float32(1e-5))), tmp_path / "back") == []


@pytest.mark.parametrize("name", ["../ours/shard_00000.safetensors", "/etc/passwd", 3])
def test_an_index_that_leads_out_of_the_folder(tmp_path, name):
    folder = theirs(tmp_path)
    (folder / hf_files.SINGLE).rename(folder / "other.safetensors")
    (folder / hf_files.INDEX).write_text(json.dumps({"weight_map": {"x": name}}))
    refusal(folder, "its weight_map must give the name of a file")


def test_pickles_are_never_read(tmp_path):
    folder = theirs(tmp_path)
    (folder / hf.WEIGHTS).rename(folder / "pytorch_model.bin")
    refusal(folder, "only config.json, pytorch_model.bin", "save_pretrained")


@pytest.mark.parametrize("content", ["", "[1]", "{", "[" * 100_000])
def test_a_broken_config(tmp_path, content):
    folder = theirs(tmp_path)
    (folder / "config.json").write_text(content)
    with pytest.raises(Damaged, match=r"config.json"):
        from_hf(folder, tmp_path / "out")


def test_a_truncated_file_is_found(tmp_path):
    folder = theirs(tmp_path)
    with open(folder / hf.WEIGHTS, "r+b") as file:
        file.truncate((folder / hf.WEIGHTS).stat().st_size - 4)
    with pytest.raises(Damaged, match=hf.WEIGHTS):
        from_hf(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_no_config_no_folder_and_a_taken_place(tmp_path):
    folder = theirs(tmp_path)
    refusal(folder / "nowhere", "there is no such folder")
    refusal(folder / hf.WEIGHTS, "it is a file; its folder is wanted")
    (tmp_path / "taken").mkdir()
    with pytest.raises(UserError, match="nothing is overwritten"):
        from_hf(folder, tmp_path / "taken")
    with pytest.raises(UserError, match="nothing is overwritten"):
        to_hf(ours(tmp_path / "again"), tmp_path / "taken")
    (folder / "config.json").unlink()
    refusal(folder, "it has no config.json")


def test_a_checkpoint_that_lacks_what_is_needed(tmp_path):
    arrays = random_arrays(("norm.weight", (8,), "float32"))
    saved = write_checkpoint(tmp_path / "ours", arrays, run={"config": {"Model": MODEL}})
    with pytest.raises(UserError, match=r"no parameter embedding.word.weight, which transformer.wte.weight"):
        to_hf(saved, tmp_path / "hf")
    with pytest.raises(UserError, match="does not tell the section Model"):
        to_hf(write_checkpoint(tmp_path / "bare", arrays), tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_memory_does_not_grow_with_the_model(tmp_path, monkeypatch):
    """24 MiB of weights in 1 MiB pieces, both ways."""
    for module in (hf, hf_files, stream):
        monkeypatch.setattr(module, "PIECE_BYTES", 2**20)
    model = {**MODEL, "hidden_size": 512, "num_layers": 2, "ffn_hidden_size": 2048}
    saved = ours(tmp_path / "ours", model=model)
    tracemalloc.start()
    try:
        to_hf(saved, tmp_path / "hf")
        from_hf(tmp_path / "hf", tmp_path / "back")
        assert tracemalloc.get_traced_memory()[1] < 5 * 2**20
    finally:
        tracemalloc.stop()
    assert fingerprint(Checkpoint(tmp_path / "back")).weights == fingerprint(saved).weights


def test_bfloat16_as_another_reader_sees_it(tmp_path):
    saved = ours(tmp_path / "ours", "bfloat16")
    to_hf(saved, tmp_path / "hf")
    found = load_file_paddle(str(tmp_path / "hf" / hf.WEIGHTS))["transformer.wte.weight"]
    word = saved.read_whole("embedding.word.weight")
    assert str(found.dtype) == "paddle.bfloat16" and found.numpy().tobytes() == word.tobytes()
