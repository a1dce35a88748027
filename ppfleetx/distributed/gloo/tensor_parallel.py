"""The steps between cut and whole tensors that Fleet's tensor-parallel layers are made of.

Stands in for `_c_identity`, `_mp_allreduce`, `_c_split` and `_c_concat` of fleet.layers.mpu.mp_ops, whose operators have
no CPU kernel, and of which `c_split`, `c_concat` end the process (private.py says when they can go). The layers look the
functions up when they are called. The argument names are Fleet's. On a rank outside the group they give None, as there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import paddle
import paddle.distributed as dist
from paddle.autograd import PyLayer
from paddle.distributed.fleet.layers.mpu import mp_ops

from ppfleetx.distributed.gloo.cross_entropy import softmax_with_cross_entropy

if TYPE_CHECKING:
    from paddle import Tensor
    from paddle.distributed.communication.group import Group


def install() -> None:
    """Put the functions below into mp_ops. Local; a second call changes nothing."""
    mp_ops._c_identity = identity
    mp_ops._mp_allreduce = all_reduce
    mp_ops._c_split = split
    mp_ops._c_concat = concat
    mp_ops._c_softmax_with_cross_entropy = softmax_with_cross_entropy


def identity(tensor: Tensor, group: Group | None = None, skip_c_identity_dynamic: bool = False) -> Tensor | None:
    """A copy of `tensor`, whose gradient is summed over the group (the entrance of a layer cut by columns)."""
    return _apply(_Identity, tensor, group)


def all_reduce(
    tensor: Tensor,
    op: int = dist.ReduceOp.SUM,
    group: Group | None = None,
    use_calc_stream: bool = True,
    use_model_parallel: bool = True,
    skip_c_identity_dynamic: bool = False,
) -> Tensor | None:
    """The sum of `tensor` over the group, whose gradient passes as it is (the exit of a layer cut by rows)."""
    assert op == dist.ReduceOp.SUM, f"unknown reduction {op}"
    return _apply(_AllReduce, tensor, group)


def split(tensor: Tensor, group: Group | None = None) -> Tensor | None:
    """This rank's cut [..., n / members] of `tensor` [..., n]; the gradient is gathered."""
    return _apply(_Split, tensor, group)


def concat(tensor: Tensor, group: Group | None = None) -> Tensor | None:
    """The whole [..., n · members] of which `tensor` [..., n] is this rank's cut; the gradient is cut."""
    return _apply(_Concat, tensor, group)


def _apply(function: type[PyLayer], tensor: Tensor, group: Group | None) -> Tensor | None:
    group = dist.get_group(0) if group is None else group
    return function.apply(tensor, group) if group.is_member() else None


def _summed(tensor: Tensor, group: Group) -> Tensor:
    total = tensor.clone()
    dist.all_reduce(total, group=group)
    return total


def _cut(tensor: Tensor, group: Group) -> Tensor:
    if tensor.shape[-1] % group.nranks:
        raise ValueError(f"the last dim of {tensor.shape} does not fall into {group.nranks} equal cuts")
    return tensor.split(group.nranks, -1)[group.rank].clone()


def _gathered(tensor: Tensor, group: Group) -> Tensor:
    whole = paddle.empty([group.nranks, *tensor.shape], tensor.dtype)
    dist.stream.all_gather(whole, tensor, group=group)
    return paddle.concat(list(whole.unbind(0)), -1)


class _Identity(PyLayer):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _summed(gradient, ctx.group)


class _AllReduce(PyLayer):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        return _summed(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clone()


class _Split(PyLayer):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _cut(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _gathered(gradient, ctx.group)


class _Concat(PyLayer):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _gathered(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _cut(gradient, ctx.group)
