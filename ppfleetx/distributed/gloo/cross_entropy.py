"""Cross entropy over a vocabulary that is cut over a group.

Stands in for `_c_softmax_with_cross_entropy` of fleet.layers.mpu.mp_ops, whose operator has no CPU kernel (private.py says
when it can go; tensor_parallel.py installs it).

Shapes: `...` any leading dims, v the rank's cut of the vocabulary. Member r holds the ids r·v … (r + 1)·v − 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import paddle
import paddle.distributed as dist
from paddle.autograd import PyLayer

if TYPE_CHECKING:
    from paddle import Tensor
    from paddle.distributed.communication.group import Group


def softmax_with_cross_entropy(
    logits: Tensor,
    label: Tensor,
    group: Group | None = None,
    return_softmax: bool = False,
    ignore_index: int = -100,
) -> Any:
    """−log softmax(logits)[label], computed in float32; all members call it with their logits and the same labels.

    Args:
        logits: [..., v].
        label: [...] or [..., 1], ids in the whole vocabulary. Where it is `ignore_index`, loss and gradient are 0.
        return_softmax: give (loss, softmax [..., v]); no gradient flows back through the softmax.

    Returns:
        The loss [..., 1] in the logits' dtype, equal on all members. None on a rank outside the group.
        Communicates two all-reduces: the maxima, then sums and labels' logits together. The backward none.

    Raises:
        ValueError: shapes that do not fit, or a label outside the vocabulary.
    """
    group = dist.get_group(0) if group is None else group
    if not group.is_member():
        return None
    if label.ndim == logits.ndim - 1:
        label = label.unsqueeze(-1)
    if label.shape != [*logits.shape[:-1], 1]:
        raise ValueError(f"labels of shape {label.shape} do not fit logits of shape {logits.shape}")
    return _CrossEntropy.apply(logits, label, group, return_softmax, ignore_index)


class _CrossEntropy(PyLayer):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, label: Tensor, group: Group, return_softmax: bool, ignore_index: int) -> Any:
        size = logits.shape[-1]
        counts = label != ignore_index  # [..., 1]
        if (counts & ((label < 0) | (label >= size * group.nranks))).any():
            raise ValueError(f"a label is outside of the vocabulary of {size * group.nranks}")
        shifted = logits.astype("float32")
        highest = shifted.max(-1, keepdim=True)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        shifted = shifted - highest
        exponentials = shifted.exp()
        position = label - group.rank * size
        mine = counts & (position >= 0) & (position < size)  # the label is in this rank's cut
        position = paddle.where(mine, position, paddle.zeros_like(position))
        picked = paddle.take_along_axis(shifted, position, -1) * mine.astype("float32")
        both = paddle.stack([exponentials.sum(-1, keepdim=True), picked])  # [2, ..., 1]
        dist.all_reduce(both, group=group)
        total, picked = both.unbind(0)
        softmax = exponentials / total
        loss = (total.log() - picked) * counts.astype("float32")
        ctx.save_for_backward(softmax, position, mine, counts)
        ctx.dtype = logits.dtype
        loss = loss.astype(logits.dtype)
        if not return_softmax:
            return loss
        softmax = softmax.astype(logits.dtype)
        ctx.mark_non_differentiable(softmax)
        return loss, softmax

    @staticmethod
    def backward(ctx: Any, loss_gradient: Tensor, *_: Tensor) -> Tensor:
        softmax, position, mine, counts = ctx.saved_tensor()
        scale = loss_gradient.astype("float32") * counts.astype("float32")  # [..., 1]
        gradient = softmax * scale
        at_label = -scale * mine.astype("float32")
        gradient = paddle.put_along_axis(gradient, position, at_label, -1, reduce="add")
        return gradient.astype(ctx.dtype)
