"""GPT against the `transformers` GPT-2 on shared random weights. Needs torch and transformers, which nothing else does."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from tests.unit.models.test_gpt import make

torch = pytest.importorskip("torch", reason="optional: pip install torch transformers")
transformers = pytest.importorskip("transformers", reason="optional: pip install torch transformers")

#: ours → theirs, for what lies outside the blocks and inside each of them
OUTSIDE = {"embedding.word": "transformer.wte", "embedding.position": "transformer.wpe", "norm": "transformer.ln_f"}
INSIDE = {
    "norm1": "ln_1", "attention.qkv": "attn.c_attn", "attention.out": "attn.c_proj",
    "norm2": "ln_2", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj",
}  # fmt: skip


def theirs(name: str) -> str:
    """The transformers name of one of our parameters."""
    path, _, kind = name.rpartition(".")
    if path in OUTSIDE:
        return f"{OUTSIDE[path]}.{kind}"
    _, number, inside = path.split(".", 2)
    return f"transformer.h.{number}.{INSIDE[inside]}.{kind}"


def their_layout(name: str, value: np.ndarray, heads: int) -> np.ndarray:
    """Query, key and value lie one after another in GPT-2, interleaved by heads in ours."""
    if ".qkv." not in name:
        return value
    parts = value.reshape(*value.shape[:-1], heads, 3, -1)
    return np.concatenate([parts[..., part, :].reshape(*value.shape[:-1], -1) for part in range(3)], axis=-1)


def test_logits_equal_transformers_gpt2():
    config, model, parameters = make(
        "Model.hidden_dropout_prob=0", "Model.vocab_size=250", "Model.vocab_size_divisible_unit=1"
    )
    sizes = config.Model
    random = np.random.default_rng(11)
    for parameter in parameters.values():
        parameter.set_value(random.normal(0.1, 0.2, parameter.shape).astype("float32"))
    reference = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=sizes.vocab_size,
            n_positions=sizes.max_position_embeddings,
            n_embd=sizes.hidden_size,
            n_layer=sizes.num_layers,
            n_head=sizes.num_attention_heads,
            activation_function="gelu_new",
            layer_norm_epsilon=1e-5,
        )
    ).eval()
    state = {
        theirs(name): torch.tensor(their_layout(name, p.numpy(), sizes.num_attention_heads))
        for name, p in parameters.items()
    }
    missing, unexpected = reference.load_state_dict(state, strict=False)
    assert not unexpected and all(
        name == "lm_head.weight" or name.endswith((".attn.bias", ".masked_bias")) for name in missing
    )
    ids = random.integers(0, sizes.vocab_size, (3, 29))
    with torch.no_grad():
        right = reference(torch.tensor(ids)).logits.numpy()
    model.eval()
    found = model(paddle.to_tensor(ids)).transpose([1, 0, 2]).numpy()
    assert np.abs(found - right).max() <= 1e-4 * max(1, np.abs(right).max())
