"""Llama to and from Hugging Face folders. What is the same for all families: test_hf.py."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

from ppfleetx.checkpoint.fingerprint import fingerprint
from ppfleetx.checkpoint.inspect import faults
from ppfleetx.checkpoint.reader import Checkpoint
from ppfleetx.config import load_config
from ppfleetx.config.errors import UserError
from ppfleetx.convert import hf
from ppfleetx.convert.hf import from_hf, to_hf
from ppfleetx.models.llama import hf as llama
from tests.unit.convert.test_hf import ours

SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 4,
}
#: 4 query heads over 2 of keys and values
MODEL = {
    "name": "Llama",
    "vocab_size": 30,
    "hidden_size": 8,
    "num_layers": 2,
    "num_attention_heads": 4,
    "ffn_hidden_size": 12,
    "max_position_embeddings": 5,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.05,
    "tie_word_embeddings": False,
    "attention_probs_dropout_prob": 0.25,
    "hidden_dropout_prob": 0.0,
    "rope_theta": 500.0,
    "rope_scaling": SCALING,
}
CONFIG = llama.to_config(MODEL)
TINY = Path(__file__).resolve().parents[3] / "configs/debug/tiny_llama.yaml"


def make_config(*files):
    """A run's configuration: what these files say, one over the other."""
    short = ("Data.Train.dataset.max_seq_len=4", "Data.Eval.dataset.max_seq_len=4")
    return load_config([str(file) for file in files], short).config


@pytest.mark.parametrize("model", [MODEL, {**MODEL, "tie_word_embeddings": True}], ids=["untied", "tied"])
@pytest.mark.parametrize(("dtype", "max_shard_bytes"), [("float32", 700), ("bfloat16", hf.MAX_SHARD_BYTES)])
def test_round_trip_to_the_bit(tmp_path, model, dtype, max_shard_bytes):
    saved = ours(tmp_path / "ours", dtype, model=model)
    files = to_hf(saved, tmp_path / "hf", max_shard_bytes)
    assert len(files) == 2 if max_shard_bytes > 700 else len(files) > 4  # with an index
    assert from_hf(tmp_path / "hf", tmp_path / "back") == []
    back = Checkpoint(tmp_path / "back")
    assert faults(tmp_path / "back") == [] and fingerprint(back).weights == fingerprint(saved).weights
    assert all(np.array_equal(back.read_whole(name), saved.read_whole(name)) for name in saved.shapes())
    assert ("head.weight" in back.shapes()) != model["tie_word_embeddings"]
    assert yaml.safe_load((tmp_path / "back/model.yaml").read_text()) == {"Model": model}


def test_names_shapes_and_transposes(tmp_path):
    saved = ours(tmp_path / "ours", model=MODEL)
    to_hf(saved, tmp_path / "hf")
    found = load_file(tmp_path / "hf" / hf.WEIGHTS)
    block = {
        "input_layernorm": (8,), "self_attn.q_proj": (8, 8), "self_attn.k_proj": (4, 8), "self_attn.v_proj": (4, 8),
        "self_attn.o_proj": (8, 8), "post_attention_layernorm": (8,), "mlp.gate_proj": (12, 8), "mlp.up_proj": (12, 8),
        "mlp.down_proj": (8, 12),
    }  # fmt: skip
    shapes = {"model.embed_tokens.weight": (30, 8), "model.norm.weight": (8,), "lm_head.weight": (30, 8)}
    shapes |= {f"model.layers.{n}.{name}.weight": shape for n in (0, 1) for name, shape in block.items()}
    assert {name: one.shape for name, one in found.items()} == shapes
    for theirs, own in (("self_attn.k_proj", "attention.k"), ("mlp.up_proj", "mlp.up"), ("mlp.gate_proj", "mlp.gate")):
        value = found[f"model.layers.1.{theirs}.weight"]
        assert np.array_equal(value, saved.read_whole(f"blocks.1.{own}.weight").T)
    assert np.array_equal(found["lm_head.weight"], saved.read_whole("head.weight"))


def refused(folder, **config):
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    with pytest.raises(UserError) as caught:
        from_hf(folder, folder.parent / "out")
    return str(caught.value)


def test_what_our_model_does_not_compute_is_refused_by_name(tmp_path):
    to_hf(ours(tmp_path / "ours", model=MODEL), tmp_path / "hf")
    for key, value in (("hidden_act", "gelu"), ("attention_bias", True), ("mlp_bias", True), ("pretraining_tp", 2)):
        assert f"config.json: {key}" in refused(tmp_path / "hf", **{key: value})
    assert "config.json: head_dim" in refused(tmp_path / "hf", head_dim=4)
    assert "rope_scaling.rope_type" in refused(tmp_path / "hf", rope_scaling={"type": "linear", "factor": 2.0})
    assert "rope_scaling.low_freq_factor" in refused(
        tmp_path / "hf", rope_scaling={"rope_type": "llama3", "factor": 2.0}
    )
    assert "Model.num_key_value_heads" in refused(tmp_path / "hf", num_key_value_heads=3)


@pytest.mark.parametrize(
    ("change", "theta", "scaling"),
    [
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 7.0, **SCALING}, "rope_scaling": None},
            7.0,
            SCALING,
        ),
        # where there are both, transformers 5 takes the older ones, and 4 knows no others
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, 500.0, SCALING),
        (
            {"rope_parameters": {"type": "llama3", **SCALING}, "rope_scaling": {"type": "default", "rope_theta": 9}},
            9,
            None,
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7}, "rope_scaling": None}, 7.0, None),
        ({"rope_scaling": {"type": "llama3", **SCALING}}, 500.0, SCALING),
        ({"rope_scaling": None}, 500.0, None),
    ],
)
def test_rotary_settings_of_both_generations(change, theta, scaling):
    model, notes = llama.from_config({**CONFIG, **change})
    assert (model["rope_theta"], model.get("rope_scaling"), notes) == (theta, scaling, [])


def test_old_files_hold_frequencies_too(tmp_path):
    to_hf(ours(tmp_path / "ours", model=MODEL), tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / hf.WEIGHTS)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(1, np.float32)
    tensors["model.rotary_emb.inv_freq"] = np.ones(1, np.float32)
    save_file(tensors, tmp_path / "hf" / hf.WEIGHTS)
    assert from_hf(tmp_path / "hf", tmp_path / "back") == []


def test_what_config_leaves_out_has_the_defaults_of_transformers():
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    config = {name: CONFIG[name] for name in (*sizes, "max_position_embeddings")}
    model, _ = llama.from_config(config)
    assert model["num_key_value_heads"] == 4 and model["rms_norm_eps"] == 1e-6 and model["rope_theta"] == 10000.0
    assert model["tie_word_embeddings"] is False and model["rope_scaling"] is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("rope_theta", value) for value in (None, "x", [1], {}, True)),
        *((key, value) for key in ("rope_scaling", "rope_parameters") for value in ("x", [1], True, 2.0)),
        *((key, None) for key in ("rms_norm_eps", "initializer_range", "attention_dropout", "tie_word_embeddings")),
        ("tie_word_embeddings", 1), ("rms_norm_eps", "1e-6"), ("rms_norm_eps", True), ("head_dim", {}), ("head_dim", "2"),
        ("rope_scaling", {"rope_type": ["llama3"]}), ("rope_scaling", {**SCALING, "rope_type": "llama3", "factor": None}),
        ("rope_scaling", {**SCALING, "rope_type": "llama3", "low_freq_factor": "1"}),
        ("rope_scaling", {"rope_type": "default", "rope_theta": None}),
    ],
)  # fmt: skip
def test_a_setting_of_another_kind_is_refused_not_replaced_by_our_default(key, value):
    """null above all: it must not become the default of our section Model, which is another number than theirs."""
    config = {**CONFIG, **({"rope_scaling": None} if key == "rope_parameters" else {}), key: value}
    with pytest.raises(UserError) as caught:
        llama.from_config(config)
    (problem,) = caught.value.problems
    told = ("rope_theta",) if value == {"rope_type": "default", "rope_theta": None} else (key,)
    assert problem.key.startswith("config.json: ") and told[0] in problem.key


def test_the_section_holds_over_a_config_of_another_model(tmp_path):
    """Plain rotary positions stay plain over a config that scales them, and the other way round."""
    to_hf(ours(tmp_path / "ours", model={**MODEL, "rope_scaling": None}), tmp_path / "hf")
    from_hf(tmp_path / "hf", tmp_path / "back")
    (tmp_path / "drops.yaml").write_text(yaml.safe_dump({"Model": {"hidden_dropout_prob": 0.1}}))
    assert make_config(TINY).Model.rope_scaling is not None
    config = make_config(TINY, tmp_path / "drops.yaml", tmp_path / "back/model.yaml")
    assert config.Model.rope_scaling is None and config.Model.rope_theta == 500.0
    assert (config.Model.hidden_dropout_prob, config.Model.attention_probs_dropout_prob) == (0.0, 0.25)
    assert (config.Model.num_key_value_heads, config.Model.ffn_hidden_size, config.Model.rms_norm_eps) == (2, 12, 1e-6)
