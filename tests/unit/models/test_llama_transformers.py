"""Llama against the `transformers` Llama on shared random weights. Needs torch and transformers, which nothing else does."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from tests.unit.models.test_gpt import make
from tests.unit.models.test_llama import TINY, numpy_llama

torch = pytest.importorskip("torch", reason="optional: pip install torch transformers")
transformers = pytest.importorskip("transformers", reason="optional: pip install torch transformers")

#: ours → theirs, for what lies outside the blocks and inside each of them
OUTSIDE = {"embedding.word": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
INSIDE = {
    "norm1": "input_layernorm", "attention.q": "self_attn.q_proj", "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj", "attention.out": "self_attn.o_proj", "norm2": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj",
}  # fmt: skip


def theirs(name: str) -> str:
    """The transformers name of one of our parameters."""
    path = name.removesuffix(".weight")
    if path in OUTSIDE:
        return f"{OUTSIDE[path]}.weight"
    _, number, inside = path.split(".", 2)
    return f"model.layers.{number}.{INSIDE[inside]}.weight"


@pytest.mark.parametrize("tied", [False, True])
def test_logits_equal_transformers_llama(tied):
    config, model, parameters = make(
        "Model.vocab_size=250", "Model.vocab_size_divisible_unit=1", f"Model.tie_word_embeddings={tied}", files=(TINY,)
    )
    sizes, scaling = config.Model, config.Model.rope_scaling
    random = np.random.default_rng(11)
    for parameter in parameters.values():
        parameter.set_value(random.normal(0.1, 0.2, parameter.shape).astype("float32"))
    rope = {**vars(scaling), "rope_theta": sizes.rope_theta}
    reference = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=sizes.vocab_size,
            hidden_size=sizes.hidden_size,
            intermediate_size=config.derived.ffn_hidden_size,
            num_hidden_layers=sizes.num_layers,
            num_attention_heads=sizes.num_attention_heads,
            num_key_value_heads=sizes.num_key_value_heads,
            max_position_embeddings=sizes.max_position_embeddings,
            rms_norm_eps=sizes.rms_norm_eps,
            rope_theta=sizes.rope_theta,
            rope_scaling=rope,
            tie_word_embeddings=tied,
            attn_implementation="eager",
        )
    ).eval()
    split = numpy_llama.split_fused({name: p.numpy() for name, p in parameters.items()}, groups=2, shared=4)
    looked_up = ("embedding.word.weight", "head.weight")
    state = {
        theirs(name): torch.tensor(value if value.ndim == 1 or name in looked_up else value.T.copy())
        for name, value in split.items()
    }
    missing, unexpected = reference.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= ({"lm_head.weight"} if tied else set())
    reference.tie_weights()
    ids = random.integers(0, sizes.vocab_size, (3, 29))
    with torch.no_grad():
        right = reference(torch.tensor(ids)).logits.numpy()
    model.eval()
    found = model(paddle.to_tensor(ids)).transpose([1, 0, 2]).numpy()
    assert np.abs(found - right).max() <= 1e-4 * max(1, np.abs(right).max())
