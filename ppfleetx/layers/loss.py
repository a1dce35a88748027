"""Cross entropy over a vocabulary that tensor parallelism may cut."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
from paddle import nn
from paddle.autograd import PyLayer

from ppfleetx.layers.edges import Edges

if TYPE_CHECKING:
    from paddle.distributed.communication.group import Group


class ParallelCrossEntropy(nn.Layer):
    """−log softmax(logits)[label], in float32, with the vocabulary padding taken out of the softmax.

    The logits stay cut: what the tensor group exchanges is two sums and a maximum a token.

    Args:
        vocab_size: columns that are tokens; further ones are padding. They are cut off rather than masked: Paddle's softmax
            clips what it exponentiates, so that masked columns would get gradients of about 1e-30 instead of none.
        edges: this rank's edges.
    """

    def __init__(self, vocab_size: int, edges: Edges | None = None):
        super().__init__()
        self.vocab_size = vocab_size
        self.edges = edges or Edges()

    def forward(self, logits: paddle.Tensor, labels: paddle.Tensor) -> paddle.Tensor:
        """logits [s, b, V/mp], labels int64 [s, b] in 0..vocab_size-1 → losses float32 [s, b]."""
        start = self.edges.mp_rank * logits.shape[-1]
        tokens = min(max(self.vocab_size - start, 0), logits.shape[-1])
        if self.edges.tensor is not None:
            return _CutCrossEntropy.apply(logits, labels - start, tokens, self.edges.tensor)
        if tokens < logits.shape[-1]:
            logits = logits[..., :tokens]
        return F.cross_entropy(logits.astype("float32"), labels, reduction="none")


class _CutCrossEntropy(PyLayer):
    """The loss from each rank's columns; a rank may hold no token at all, only padding."""

    @staticmethod
    def forward(ctx: Any, logits: paddle.Tensor, labels: paddle.Tensor, tokens: int, group: Group) -> paddle.Tensor:
        """labels count from this rank's first column; the first `tokens` columns are no padding."""
        kept = logits.astype("float32")
        if tokens < logits.shape[-1]:
            columns = paddle.arange(logits.shape[-1])
            kept = paddle.where(columns < tokens, kept, paddle.full([], -1e30, "float32"))
        peak = kept.max(-1, keepdim=True)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        shifted = kept - peak
        powers = shifted.exp()  # 0 for padding
        mine = ((labels >= 0) & (labels < tokens)).astype("float32").unsqueeze(-1)
        index = labels.clip(0, logits.shape[-1] - 1).unsqueeze(-1)
        picked = paddle.take_along_axis(shifted, index, -1) * mine
        sums = paddle.concat([powers.sum(-1, keepdim=True), picked], -1)  # [s, b, 2]
        dist.all_reduce(sums, group=group)
        total, picked = sums[..., :1], sums[..., 1:]
        ctx.save_for_backward(powers / total, index, mine)
        ctx.dtype = logits.dtype
        return (total.log() - picked).squeeze(-1)

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
        probabilities, index, mine = ctx.saved_tensor()
        hits = paddle.zeros_like(probabilities).put_along_axis(index, mine, -1)
        return ((probabilities - hits) * gradient.unsqueeze(-1)).astype(ctx.dtype)
