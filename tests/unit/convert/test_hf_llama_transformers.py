"""Llama's converted weights give the numbers of `transformers`. Needs torch and transformers, which nothing else does."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
import yaml

from ppfleetx.checkpoint.layout import stored_shapes
from ppfleetx.checkpoint.reader import Checkpoint
from ppfleetx.convert.hf import from_hf, to_hf
from ppfleetx.models import registry
from tests.unit.checkpoint.written import write_checkpoint
from tests.unit.models.test_gpt import make
from tests.unit.models.test_llama import TINY

torch = pytest.importorskip("torch", reason="optional: pip install torch transformers")
transformers = pytest.importorskip("transformers", reason="optional: pip install torch transformers")

#: Llama 3.1's scaling over a first context of 16, so that 31 places touch all its branches
ROTARY = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
SIZES = (
    "Model.vocab_size=37", "Model.hidden_size=48", "Model.num_layers=3", "Model.num_attention_heads=6",
    "Model.num_key_value_heads=2", "Model.ffn_hidden_size=44", "Model.max_position_embeddings=32",
    "Model.rope_theta=500.0", "Model.rms_norm_eps=1e-6",
)  # fmt: skip


def our_logits(saved, ids, *overrides):
    """ids [b, s] → logits [b, s, vocab] of our model with the weights of a checkpoint, as a run reads them."""
    config, model, parameters = make(*SIZES, *overrides, files=(TINY,))
    for parameter in parameters.values():
        spec = parameter.spec
        parameter.set_value(saved.read_piece(spec, spec.box(), None).reshape(spec.shape))
    model.eval()
    return model(paddle.to_tensor(ids)).transpose([1, 0, 2]).numpy()[..., : config.Model.vocab_size]


def their_logits(model, ids):
    with torch.no_grad():
        return model.eval()(torch.tensor(ids)).logits.float().numpy()


def assert_same(left, right):
    assert left.shape == right.shape == (3, 31, 37) and np.abs(right).max() > 0.5
    assert np.abs(left - right).max() <= 1e-4 * max(1.0, np.abs(right).max())


IDS = np.random.default_rng(2).integers(0, 37, (3, 31))


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_of_theirs(tmp_path, tied):
    """Random weights of `transformers`, several files with an index."""
    torch.manual_seed(4)
    config = transformers.LlamaConfig(
        vocab_size=37, hidden_size=48, intermediate_size=44, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=32, rms_norm_eps=1e-6, rope_theta=500.0,
        rope_scaling={name: value for name, value in ROTARY.items() if name != "rope_theta"}, initializer_range=0.3,
        tie_word_embeddings=tied,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.3)
    model.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    assert from_hf(tmp_path / "hf", tmp_path / "ours") == []
    saved, right = Checkpoint(tmp_path / "ours"), their_logits(model, IDS)
    tie = f"Model.tie_word_embeddings={tied}"
    for fused in ("true", "false"):
        assert_same(our_logits(saved, IDS, tie, f"Model.fuse_attn_qkv={fused}"), right)
    # and the frequencies' scaling is seen
    assert np.abs(our_logits(saved, IDS, tie, "Model.rope_scaling=null") - right).max() > 0.1


def test_a_model_of_ours_and_back_through_save_pretrained(tmp_path):
    config, _, _ = make(*SIZES, files=(TINY,))
    random = np.random.default_rng(8)
    shapes = {
        name: shape for spec in registry.parameters(config).values() for name, shape in stored_shapes(spec).items()
    }
    arrays = {name: random.normal(0.1, 0.3, shape).astype("float32") for name, shape in shapes.items()}
    saved = write_checkpoint(tmp_path / "ours", arrays, 3, 1, run={"config": yaml.safe_load(config.to_yaml())})
    to_hf(saved, tmp_path / "hf", 20_000)
    model, report = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_same(our_logits(saved, IDS), their_logits(model, IDS))
    model.save_pretrained(tmp_path / "again")
    from_hf(tmp_path / "again", tmp_path / "back")
    back = Checkpoint(tmp_path / "back")
    assert back.shapes() == saved.shapes()
    assert all(np.array_equal(back.read_whole(name), arrays[name]) for name in saved.shapes())
