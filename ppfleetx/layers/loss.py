"""Cross entropy over a vocabulary that tensor parallelism may cut."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
from paddle import nn
from paddle.autograd import PyLayer

from ppfleetx.layers.edges import Edges

if TYPE_CHECKING:
    from paddle.distributed.communication.group import Group

#: label of a place that is not predicted: its loss and its gradient are 0 (the value of Paddle and Hugging Face)
IGNORE_INDEX = -100
#: Paddle's CPU kernel (3.3.1) exponentiates no less than -64, so a loss from here on may be too small
_CAPPED_FROM = 63.9


class ParallelCrossEntropy(nn.Layer):
    """−log softmax(logits)[label], in float32, with the vocabulary padding taken out of the softmax.

    The logits stay cut: what the tensor group exchanges is two sums and a maximum a token.

    Args:
        vocab_size: columns that are tokens; further ones are padding.
        edges: this rank's edges.
    """

    def __init__(self, vocab_size: int, edges: Edges | None = None):
        super().__init__()
        self.vocab_size = vocab_size
        self.edges = edges or Edges()

    def forward(self, logits: paddle.Tensor, labels: paddle.Tensor) -> paddle.Tensor:
        """logits [s, b, V/mp], labels int64 [s, b] in 0..vocab_size-1 or `IGNORE_INDEX` → losses float32 [s, b].

        A loss on an accelerator is NaN where the label is neither: to look for such labels the host would have to wait.

        Raises:
            ValueError: on a CPU, for such a label.
        """
        counts = labels != IGNORE_INDEX
        wrong = counts & ((labels < 0) | (labels >= self.vocab_size))
        if labels.place.is_cpu_place() and wrong.any():
            found = labels.masked_select(wrong)[0].item()
            raise ValueError(f"labels must lie in 0..{self.vocab_size - 1} or be {IGNORE_INDEX}, and {found} is there")
        losses = self._losses(logits, labels, counts)
        return losses if labels.place.is_cpu_place() else losses.masked_fill(wrong, math.nan)

    def _losses(self, logits: paddle.Tensor, labels: paddle.Tensor, counts: paddle.Tensor) -> paddle.Tensor:
        start = self.edges.mp_rank * logits.shape[-1]
        tokens = min(max(self.vocab_size - start, 0), logits.shape[-1])
        if self.edges.tensor is None and tokens == logits.shape[-1]:
            losses = F.cross_entropy(logits.astype("float32"), labels, reduction="none", ignore_index=IGNORE_INDEX)
            if not losses.place.is_cpu_place() or losses.max() < _CAPPED_FROM:
                return losses
        return _CrossEntropy.apply(logits, labels - start, counts.astype("float32"), tokens, self.edges.tensor)


class _CrossEntropy(PyLayer):
    """The loss from each rank's columns, of which the last may be padding; a rank may hold nothing else."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: paddle.Tensor,
        labels: paddle.Tensor,
        counts: paddle.Tensor,
        tokens: int,
        group: Group | None,
    ) -> paddle.Tensor:
        """labels count from this rank's first column; counts is 1 where they are to be predicted, else 0; the first `tokens`
        columns are no padding."""
        wide = logits.astype("float32")
        peak = _peak(wide, tokens, group)
        index = labels.clip(0, wide.shape[-1] - 1).unsqueeze(-1)
        mine = ((labels >= 0) & (labels < tokens)).astype("float32").unsqueeze(-1)
        picked = (paddle.take_along_axis(wide, index, -1) - peak) * mine
        powers = (
            wide - peak
        ).exp_()  # in place, and after what copies for a while: one array of the logits' size in all
        if tokens < wide.shape[-1]:
            powers[..., tokens:] = 0.0  # a copy without padding, and its gradient, would take 16 % of a small step
        sums = paddle.stack([powers.sum(-1, keepdim=True), picked])  # [2, s, b, 1]
        if group is not None:
            dist.all_reduce(sums, group=group)
        total, picked = sums[0], sums[1]
        ctx.save_for_backward(powers, counts.unsqueeze(-1) / total, index, mine * counts.unsqueeze(-1))
        ctx.dtype = logits.dtype
        return (total.log() - picked).squeeze(-1) * counts

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
        powers, share, index, mine = ctx.saved_tensor()
        gradient = gradient.unsqueeze(-1)
        result = powers * (share * gradient)  # powers · share is the softmax, or 0
        result.put_along_axis_(index, -mine * gradient, -1, reduce="add")
        return result.astype(ctx.dtype)


def _peak(wide: paddle.Tensor, tokens: int, group: Group | None) -> paddle.Tensor:
    """The largest logit of each place that is no padding, over the group: [s, b, V/mp] → [s, b, 1]."""
    if tokens:
        peak = wide[..., :tokens].max(-1, keepdim=True)
    else:
        peak = paddle.full([*wide.shape[:-1], 1], -1e30, "float32")
    if group is not None:
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
    return peak
