"""Causal self-attention.

Shapes: s sequence, b batch, h hidden, n local heads, m local heads of keys and values, d head dim. Outside [s, b, h]; the
kernel works on [b, n, s, d].
"""

from __future__ import annotations

from dataclasses import dataclass

import paddle
import paddle.nn.functional as F
from paddle import nn

from ppfleetx.layers.dropout import CUT, Dropout
from ppfleetx.layers.kernels import has_kernel
from ppfleetx.layers.linear import ColumnParallelLinear, RowParallelLinear
from ppfleetx.layers.parameter import ParameterMaker
from ppfleetx.layers.recompute import RecomputePlan
from ppfleetx.layers.rotary import Rotary


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """What an attention layer is told about itself.

    Attributes:
        heads, head_dim: of the whole layer.
        kv_heads: heads of keys and values; each serves heads / kv_heads neighbouring query heads.
        dropout: share of attention probabilities that are dropped.
        qk_divisor: q·k is divided by this before, and multiplied by it after the cast to float32; it changes nothing in
            exact arithmetic and keeps float16 in range (`scale_qk_by_layer_num`).
        rotary: turns queries and keys by their positions; None: nothing does.
        fused_qkv: one linear for query, key and value.
        fused_linear, fused_softmax, flash: GPU kernels.
    """

    heads: int
    kv_heads: int
    head_dim: int
    dropout: float = 0.0
    qk_divisor: float = 1.0
    rotary: Rotary | None = None
    fused_qkv: bool = True
    fused_linear: bool = False
    fused_softmax: bool = False
    flash: bool = False


class CausalSelfAttention(nn.Layer):
    """Multi-head attention in which a position sees itself and what is before it (Vaswani et al. 2017), with fewer heads of
    keys and values than of queries where so asked (Ainslie et al. 2023)."""

    def __init__(self, path: str, options: AttentionOptions, maker: ParameterMaker, plan: RecomputePlan, block: int):
        super().__init__()
        self.options = options
        names = ("qkv",) if options.fused_qkv else ("q", "k", "v")
        self.inputs = nn.LayerList(
            [ColumnParallelLinear(f"{path}.{name}", maker, options.fused_linear) for name in names]
        )
        self.out = RowParallelLinear(f"{path}.out", maker, options.fused_linear)
        self.edges = maker.edges
        self.core = CoreAttention(options, Dropout(options.dropout, CUT, maker.tracker))
        self._call_core = plan.caller("core_attn", block)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """[s, b, h] → [s, b, h]."""
        q, k, v = (self.edges.cut_heads(tensor) for tensor in self._query_key_value(x))
        if (rotary := self.options.rotary) is not None:
            q, k = rotary(q), rotary(k)  # here every rank holds whole sequences, of some heads
        mixed = self.edges.cut_sequence(self._call_core(self.core, q, k, v))
        return self.out(mixed.reshape([*mixed.shape[:2], -1]))

    def _query_key_value(self, x: paddle.Tensor) -> list[paddle.Tensor]:
        """Tensors [s, b, n, d], [s, b, m, d] and [s, b, m, d], m the local heads of keys and values.

        The fused linear's columns lie as [m, n/m + 2, d], so that a cut keeps heads whole.
        """
        shared = self.options.heads // self.options.kv_heads
        projected = [linear(x) for linear in self.inputs]
        if self.options.fused_qkv:
            s, b = projected[0].shape[:2]
            projected = (
                projected[0].reshape([s, b, -1, shared + 2, self.options.head_dim]).split([shared, 1, 1], axis=3)
            )
        return [one.reshape([*one.shape[:2], -1, self.options.head_dim]) for one in projected]


class CoreAttention(nn.Layer):
    """softmax(mask(q·kᵀ/√d))·v, with dropout on the probabilities."""

    def __init__(self, options: AttentionOptions, dropout: Dropout):
        super().__init__()
        self.options = options
        self.dropout = dropout
        self.scale = 1.0 / (options.head_dim**0.5 * options.qk_divisor)

    def forward(self, q: paddle.Tensor, k: paddle.Tensor, v: paddle.Tensor) -> paddle.Tensor:
        """q [s, b, n, d], k and v [s, b, m, d] with n a multiple of m → [s, b, n, d]."""
        if self.options.flash:
            return self._flash(q, k, v)
        k, v = (_repeat(tensor, q.shape[2] // k.shape[2]) for tensor in (k, v))
        q, k, v = (tensor.transpose([1, 2, 0, 3]) for tensor in (q, k, v))
        scores = paddle.matmul(q * self.scale, k, transpose_y=True)  # [b, n, s, s]
        probabilities = self.dropout(self._softmax(scores))
        return paddle.matmul(probabilities, v).transpose([2, 0, 1, 3])

    def _softmax(self, scores: paddle.Tensor) -> paddle.Tensor:
        """Masked softmax in float32, back in the type of the scores."""
        divisor, dtype = self.options.qk_divisor, scores.dtype
        scores = scores.astype("float32")
        if divisor != 1:
            scores = scores * divisor
        if self.options.fused_softmax and _fits_fused_softmax(scores):
            return paddle.incubate.softmax_mask_fuse_upper_triangle(scores).astype(dtype)
        return F.softmax(scores + _causal_mask(scores.shape[-1]), axis=-1).astype(dtype)

    def _flash(self, q: paddle.Tensor, k: paddle.Tensor, v: paddle.Tensor) -> paddle.Tensor:
        """Flash attention (GPU, half precision); it masks, scales, drops and shares keys inside, in float32."""
        q, k, v = (tensor.transpose([1, 0, 2, 3]) for tensor in (q, k, v))  # [b, s, n, d]
        p = self.options.dropout if self.training else 0.0
        with self.dropout.tracker.rng_state(self.dropout.stream):
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True, training=self.training)
        return out.transpose([1, 0, 2, 3])


def _fits_fused_softmax(scores: paddle.Tensor) -> bool:
    """Whether there is a fused kernel for scores [b, n, s, s]: it wants 32 ≤ s ≤ 16384, and whole blocks of up to 8 rows."""
    length = scores.shape[-1]
    return 32 <= length <= 16384 and length % 8 == 0 and has_kernel("fused_softmax_mask_upper_triangle", scores)


def _repeat(x: paddle.Tensor, times: int) -> paddle.Tensor:
    """[s, b, m, d] → [s, b, m · times, d], each head so many times in a row."""
    return x if times == 1 else x.unsqueeze(3).expand([-1, -1, -1, times, -1]).flatten(2, 3)


def _causal_mask(length: int) -> paddle.Tensor:
    """float32 [length, length]: 0 where column ≤ row, else −1e30 (finite: a row of −inf would make NaN)."""
    return paddle.triu(paddle.full([length, length], -1e30, "float32"), diagonal=1)
