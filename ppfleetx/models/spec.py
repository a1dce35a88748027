"""What the families' models on paper are made of. Imports no Paddle.

Initial values follow GPT-2 (Radford et al. 2019, section 2.3): N(0, σ), and σ/√(2L) for the two matrices of a block that end in
the residual stream; biases 0, norms 1 and 0. Vectors do not decay.
"""

from __future__ import annotations

import math

from ppfleetx.config import Config
from ppfleetx.layers.spec import ParameterSpec

WORD_EMBEDDING = "embedding.word.weight"
HEAD = "head.weight"
FINAL_NORM = "norm"


def ends(config: Config, tied: bool) -> tuple[ParameterSpec, ParameterSpec]:
    """The word embedding and the head, both [padded vocabulary, hidden] and cut over the vocabulary; tied: one matrix."""
    model = config.Model
    shape = (config.derived.padded_vocab_size, model.hidden_size)
    std, rows = model.initializer_range, model.vocab_size
    word = ParameterSpec(
        name=WORD_EMBEDDING, shape=shape, mp_dim=0, std=std, rows=rows, at_both_ends=tied, is_lookup=not tied
    )
    if tied:
        return word, ParameterSpec(name=HEAD, shape=shape, mp_dim=0, rows=rows, tied_to=WORD_EMBEDDING)
    return word, ParameterSpec(name=HEAD, shape=shape, mp_dim=0, std=std, rows=rows)


def attention(config: Config, path: str, bias: bool) -> list[ParameterSpec]:
    """Query, key and value, and the output matrix.

    The first are three linears, or, with `Model.fuse_attn_qkv`, one of the same matrices: its columns lie by heads of keys, as
    [kv heads, (query heads of it, 1 key, 1 value) × head dim].
    """
    model, kv_heads = config.Model, config.derived.num_key_value_heads
    hidden, std, heads = model.hidden_size, model.initializer_range, model.num_attention_heads
    width = hidden // heads
    columns = {"q": heads * width, "k": kv_heads * width, "v": kv_heads * width}
    split = [linear(f"{path}.{part}", (hidden, size), std, 1, bias) for part, size in columns.items()]
    if model.fuse_attn_qkv:
        whole = linear(f"{path}.qkv", (hidden, sum(columns.values())), std, 1, bias)
        names = zip(*([spec.name for spec in specs] for specs in split), strict=True)
        share = (heads // kv_heads, 1, 1)
        inputs = [spec.fused(tuple(parts), kv_heads, share) for spec, parts in zip(whole, names, strict=True)]
    else:
        inputs = [spec for specs in split for spec in specs]
    return [*inputs, *linear(f"{path}.out", (hidden, hidden), residual_std(config), 0, bias)]


def linear(path: str, shape: tuple[int, int], std: float, mp_dim: int, bias: bool) -> list[ParameterSpec]:
    """A matrix [in, out] and its bias, if it has one; the bias is cut where the columns are."""
    weight = ParameterSpec(name=f"{path}.weight", shape=shape, mp_dim=mp_dim, std=std)
    if not bias:
        return [weight]
    cut = 0 if mp_dim == 1 else None
    return [weight, ParameterSpec(name=f"{path}.bias", shape=shape[1:], mp_dim=cut, decay=False)]


def norm(path: str, hidden: int, bias: bool) -> list[ParameterSpec]:
    """A normalisation's scale and, if it has one, its shift."""
    scale = ParameterSpec(name=f"{path}.weight", shape=(hidden,), decay=False, fill=1.0)
    return [scale, ParameterSpec(name=f"{path}.bias", shape=(hidden,), decay=False)] if bias else [scale]


def residual_std(config: Config) -> float:
    """σ of a matrix that ends in the residual stream."""
    return config.Model.initializer_range / math.sqrt(2 * config.Model.num_layers)
