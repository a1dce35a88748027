"""Converted weights give the numbers of `transformers`. Needs torch and transformers, which nothing else does."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from ppfleetx.checkpoint.layout import stored_shapes
from ppfleetx.checkpoint.reader import Checkpoint
from ppfleetx.convert.hf import from_hf, to_hf
from tests.unit.checkpoint.written import write_checkpoint
from tests.unit.models.test_gpt import make

torch = pytest.importorskip("torch", reason="optional: pip install torch transformers")
transformers = pytest.importorskip("transformers", reason="optional: pip install torch transformers")

SIZES = ("Model.vocab_size=37", "Model.hidden_size=24", "Model.num_layers=3", "Model.num_attention_heads=3")
PLAIN = ("Model.hidden_dropout_prob=0", "Model.attention_probs_dropout_prob=0")


def ours(saved, *overrides):
    """Our model with the weights of a checkpoint, as a run reads them: ids [b, s] → logits [b, s, vocab]."""
    config, model, parameters = make(*SIZES, *PLAIN, *overrides)
    for parameter in parameters.values():
        spec = parameter.spec
        parameter.set_value(saved.read_piece(spec, spec.box(), None).reshape(spec.shape))
    model.eval()
    vocab = config.Model.vocab_size
    return lambda ids: model(paddle.to_tensor(ids)).transpose([1, 0, 2]).numpy()[..., :vocab]


def theirs(model):
    def logits(ids):
        with torch.no_grad():
            return model.eval()(torch.tensor(ids)).logits.float().numpy()

    return logits


def assert_same(a, b):
    ids = np.random.default_rng(2).integers(0, 37, (3, 31))
    left, right = a(ids), b(ids)
    assert left.shape == right.shape == (3, 31, 37)
    assert np.abs(right).max() > 0.5
    np.testing.assert_allclose(left, right, rtol=1e-5, atol=2e-5)


def test_a_model_of_theirs(tmp_path):
    """Trained elsewhere: gelu_new written as gelu_pytorch_tanh, sizes that are no powers of two, several files."""
    torch.manual_seed(4)
    config = transformers.GPT2Config(
        vocab_size=37, n_positions=32, n_embd=24, n_layer=3, n_head=3, activation_function="gelu_pytorch_tanh",
        initializer_range=0.3, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or ".ln_" in name:
            torch.nn.init.normal_(parameter, 0.3, 0.3)
    model.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    assert from_hf(tmp_path / "hf", tmp_path / "ours") == []
    saved = Checkpoint(tmp_path / "ours")
    for fused in ("true", "false"):
        assert_same(ours(saved, f"Model.fuse_attn_qkv={fused}"), theirs(model))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_of_ours(tmp_path, dtype):
    """Written in parts, ffn of its own, files of at most 20 kB; in half precision every weight keeps its bits."""
    import yaml

    config, _, parameters = make(*SIZES, *PLAIN, "Model.ffn_hidden_size=40", "Model.fuse_attn_qkv=false")
    random = np.random.default_rng(8)
    arrays = {}
    for parameter in parameters.values():
        ((name, shape),) = stored_shapes(parameter.spec).items()
        values = paddle.to_tensor(random.normal(0.1, 0.3, shape).astype("float32")).astype(dtype)
        arrays[name] = values.numpy()  # bfloat16 comes as uint16
    run = {"config": yaml.safe_load(config.to_yaml())}
    saved = write_checkpoint(tmp_path / "ours", arrays, parts=3, dim=1, run=run)
    to_hf(saved, tmp_path / "hf", 20_000)
    model, report = transformers.GPT2LMHeadModel.from_pretrained(
        tmp_path / "hf", output_loading_info=True, dtype="auto"
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert str(model.dtype) == f"torch.{dtype}"
    if dtype == "float32":
        assert_same(ours(saved, "Model.ffn_hidden_size=40"), theirs(model))
    else:
        word = model.transformer.wte.weight.detach().view(torch.uint16).numpy()
        assert np.array_equal(word, arrays["embedding.word.weight"])


def test_there_and_back_through_save_pretrained(tmp_path):
    """What transformers itself writes after it has read ours is ours again, to the bit."""
    test_a_model_of_ours(tmp_path / "first", "float32")
    transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "first/hf").save_pretrained(tmp_path / "again")
    from_hf(tmp_path / "again", tmp_path / "back")
    back, before = Checkpoint(tmp_path / "back"), Checkpoint(tmp_path / "first/ours")
    assert back.shapes() == before.shapes()
    assert all(np.array_equal(back.read_whole(name), before.read_whole(name)) for name in before.shapes())
