"""GPT on paper: its logical parameters and the floating-point work of a token. Imports no Paddle."""

from __future__ import annotations

import math

from ppfleetx.config import Config
from ppfleetx.layers.spec import ParameterSpec

WORD_EMBEDDING = "embedding.word.weight"
POSITION_EMBEDDING = "embedding.position.weight"


def parameters(config: Config) -> dict[str, ParameterSpec]:
    """All logical parameters by name, in model order.

    Initial values follow GPT-2 (Radford et al. 2019, section 2.3): N(0, σ), and σ/√(2L) for the two matrices of a block
    that end in the residual stream; biases 0, norms 1 and 0. Vectors do not decay.
    """
    model, derived = config.Model, config.derived
    hidden, std = model.hidden_size, model.initializer_range
    specs = [
        ParameterSpec(
            name=WORD_EMBEDDING,
            shape=(derived.padded_vocab_size, hidden),
            mp_dim=0,
            std=std,
            rows=model.vocab_size,
            at_both_ends=True,
        ),
        ParameterSpec(name=POSITION_EMBEDDING, shape=(model.max_position_embeddings, hidden), std=std),
    ]
    for number in range(model.num_layers):
        specs += _block(config, f"blocks.{number}")
    specs += _norm("norm", hidden)
    specs.append(
        ParameterSpec(name="head.weight", shape=specs[0].shape, mp_dim=0, rows=model.vocab_size, tied_to=WORD_EMBEDDING)
    )
    return {spec.name: spec for spec in specs}


def flops_per_token(config: Config, seq_len: int) -> int:
    """Floating-point operations of forward and backward for one token (recomputation not counted, as in model FLOPs).

    6 for each weight of a matmul (2 forward, 4 backward) plus the attention products, 12·L·h·s
    (Chowdhery et al. 2022, PaLM, appendix B). The word embedding counts once, as the head.
    """
    matrices = [spec for spec in parameters(config).values() if len(spec.shape) == 2 and not spec.tied_to]
    weights = sum(spec.size for spec in matrices if spec.name != POSITION_EMBEDDING)
    return 6 * weights + 12 * config.Model.num_layers * config.Model.hidden_size * seq_len


def _block(config: Config, path: str) -> list[ParameterSpec]:
    model, ffn = config.Model, config.derived.ffn_hidden_size
    hidden, std = model.hidden_size, model.initializer_range
    residual_std = std / math.sqrt(2 * model.num_layers)
    return [
        *_norm(f"{path}.norm1", hidden),
        *_attention_inputs(config, f"{path}.attention"),
        *_linear(f"{path}.attention.out", (hidden, hidden), residual_std, mp_dim=0),
        *_norm(f"{path}.norm2", hidden),
        *_linear(f"{path}.mlp.up", (hidden, ffn), std, mp_dim=1),
        *_linear(f"{path}.mlp.down", (ffn, hidden), residual_std, mp_dim=0),
    ]


def _attention_inputs(config: Config, path: str) -> list[ParameterSpec]:
    """Query, key and value: three linears, or one that holds the same matrices interleaved by heads."""
    model = config.Model
    shape = (model.hidden_size, model.hidden_size)
    split = [_linear(f"{path}.{part}", shape, model.initializer_range, mp_dim=1) for part in ("q", "k", "v")]
    if not model.fuse_attn_qkv:
        return [spec for pair in split for spec in pair]
    weights, biases = zip(*split, strict=True)
    return [
        ParameterSpec(
            name=f"{path}.qkv.weight", shape=(model.hidden_size, 3 * model.hidden_size), mp_dim=1,
            std=model.initializer_range, parts=tuple(spec.name for spec in weights),
            groups=model.num_attention_heads,
        ),
        ParameterSpec(
            name=f"{path}.qkv.bias", shape=(3 * model.hidden_size,), mp_dim=0, decay=False,
            parts=tuple(spec.name for spec in biases),
            groups=model.num_attention_heads,
        ),
    ]  # fmt: skip


def _linear(path: str, shape: tuple[int, int], std: float, mp_dim: int) -> tuple[ParameterSpec, ParameterSpec]:
    """A matrix [in, out] and its bias; the bias is cut where the columns are."""
    weight = ParameterSpec(name=f"{path}.weight", shape=shape, mp_dim=mp_dim, std=std)
    bias = ParameterSpec(name=f"{path}.bias", shape=shape[1:], mp_dim=0 if mp_dim == 1 else None, decay=False)
    return weight, bias


def _norm(path: str, hidden: int) -> list[ParameterSpec]:
    return [
        ParameterSpec(name=f"{path}.weight", shape=(hidden,), decay=False, fill=1.0),
        ParameterSpec(name=f"{path}.bias", shape=(hidden,), decay=False),
    ]
