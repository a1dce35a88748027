"""Collectives over one group. With `group=None`, a group of one, each is the identity. All members call them alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import paddle
import paddle.distributed as dist

if TYPE_CHECKING:
    from paddle import Tensor
    from paddle.distributed.communication.group import Group

#: gradients that travel together; large enough to amortise a call, small enough to bound the extra memory
BUCKET_BYTES = 32 * 2**20


def all_reduce_sum_(tensor: Tensor, group: Group | None) -> Tensor:
    """Replace `tensor`, of any shape, by its sum over the group, in place. One all-reduce of its size."""
    if group is not None:
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)
    return tensor


class Transfer:
    """A collective under way, or over. It keeps the tensors alive until it is over.

    Attributes:
        out: the result, to be read after `wait`.
    """

    def __init__(self, out: Tensor, source: Tensor, task: Any):
        self.out, self._source, self._task = out, source, task

    def wait(self) -> Tensor:
        """The result; on a GPU it is the computation that waits, not the caller."""
        if self._task is not None:
            self._task.wait()
            self._task = None
        return self.out


def start_all_reduce(tensor: Tensor, group: Group) -> Transfer:
    """Replaces `tensor`, of any shape, by its sum over the group, beside the computation. (Gloo is over when it returns.)"""
    return Transfer(tensor, tensor, dist.stream.all_reduce(tensor, group=group, sync_op=False))


def start_all_gather(out: Tensor, part: Tensor, group: Group, overlap: bool = True) -> Transfer:
    """Puts the members' parts end to end into `out`; beside the computation, if `overlap`, else before what follows."""
    task = dist.stream.all_gather(out, part, group=group, sync_op=not overlap, use_calc_stream=not overlap)
    return Transfer(out, part, task if overlap else None)


def start_reduce_scatter(out: Tensor, whole: Tensor, group: Group, overlap: bool = True) -> Transfer:
    """Puts this member's part of the sum of all `whole` into `out`; `overlap` as in `start_all_gather`."""
    task = dist.stream.reduce_scatter(out, whole, group=group, sync_op=not overlap, use_calc_stream=not overlap)
    return Transfer(out, whole, task if overlap else None)


def broadcast_(tensor: Tensor, group: Group | None, source: int = 0) -> Tensor:
    """Replace `tensor` by that of the group's member number `source`, in place. One broadcast of its size."""
    if group is not None:
        dist.broadcast(tensor, src=group.ranks[source], group=group)
    return tensor


def all_gather_ints(values: Sequence[int], group: Group | None) -> list[list[int]]:
    """The lists of all members, in group order; each must be as long as the others. One all-gather of int64."""
    if group is None:
        return [list(values)]
    gathered: list[Tensor] = []
    dist.all_gather(gathered, paddle.to_tensor(list(values), dtype="int64"), group=group)
    return [one.tolist() for one in gathered]


def average_gradients(
    parameters: Sequence[Tensor],
    group: Group | None,
    *,
    scale: float | None = None,
    reduce_dtype: str | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> None:
    """Replace every `.grad` by its sum over the group times `scale`, in place.

    A parameter without a gradient here counts as zeros, and gets one if another member has one; where no member has
    one it stays None, so that the optimizer skips it as it would in a single process.

    Args:
        parameters: the same ones in the same order on every member; those with `stop_gradient` are left alone.
        group: the members; None leaves the gradients but for `scale`.
        scale: factor on the sum; None is 1 / number of members, the mean.
        reduce_dtype: type in which sums are formed; None is the gradients' own.
        bucket_bytes: bound on the bytes of one bucket, unless a single parameter is larger.

    Communicates one all-reduce a bucket: gradients of one dtype end to end, then one flag a parameter.
    """
    factor = (1.0 / group.nranks if group is not None else 1.0) if scale is None else scale
    trainable = [parameter for parameter in parameters if not parameter.stop_gradient]
    with paddle.no_grad():
        if group is None:
            for gradient in (parameter.grad for parameter in trainable):
                if gradient is not None and factor != 1.0:
                    gradient.scale_(factor)
            return
        for bucket in _buckets(trainable, bucket_bytes):
            _reduce_bucket(bucket, group, factor, reduce_dtype or bucket[0].dtype)


def _buckets(parameters: Sequence[Tensor], bucket_bytes: int) -> list[list[Tensor]]:
    """Parameters of one dtype each, in order, as many as fit; the same on every member since only shapes decide."""
    buckets: list[list[Tensor]] = []
    filling: dict[str, tuple[list[Tensor], int]] = {}
    for parameter in parameters:
        dtype, size = str(parameter.dtype), parameter.size * parameter.element_size()
        bucket, used = filling.get(dtype, ([], 0))
        if not bucket or used + size > bucket_bytes:
            bucket, used = [], 0
            buckets.append(bucket)
        bucket.append(parameter)
        filling[dtype] = (bucket, used + size)
    return buckets


def _reduce_bucket(bucket: Sequence[Tensor], group: Group, factor: float, dtype: Any) -> None:
    gradients = [parameter.grad for parameter in bucket]
    parts = [
        paddle.zeros([parameter.size], dtype) if gradient is None else gradient.flatten().astype(dtype)
        for parameter, gradient in zip(bucket, gradients, strict=True)
    ]
    # The flags say whether any member has a gradient; they ride along to save a call.
    flags = paddle.to_tensor([float(gradient is not None) for gradient in gradients], dtype=dtype)
    flat = paddle.concat([*parts, flags])
    dist.all_reduce(flat, op=dist.ReduceOp.SUM, group=group)
    # Only a member that lacks a gradient must look at the flags, which on a GPU waits for the reduction.
    complete = all(gradient is not None for gradient in gradients)
    exists = [True] * len(bucket) if complete else (flat[-len(bucket) :] != 0).tolist()
    flat.scale_(factor)
    start = 0
    for parameter, gradient, wanted in zip(bucket, gradients, exists, strict=True):
        reduced = flat[start : start + parameter.size].reshape(parameter.shape).astype(bucket[0].dtype)
        start += parameter.size
        if gradient is not None:
            gradient.copy_(reduced, True)  # `.grad = value` copies into a new tensor and leaves this one as it was
        elif wanted:
            parameter.grad = reduced
