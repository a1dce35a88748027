"""Where values change between whole and cut over a group; everything here is the identity over a group of one.

The tensor group's edges are Megatron's f and g (Shoeybi et al. 2019, section 3) or, with sequence parallel, their gather and
scatter forms (Korthikanti et al. 2022, section 4.2.2); the sep group's are Ulysses' (Jacobs et al. 2023). Shapes: s sequence,
b batch, h hidden, n heads, d head dim; mp and sep are the sizes of the groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import paddle
import paddle.distributed as dist
from paddle.autograd import PyLayer

from ppfleetx.distributed.collectives import Transfer, start_all_gather, start_all_reduce, start_reduce_scatter

if TYPE_CHECKING:
    from paddle.distributed.communication.group import Group


class Edges:
    """The edges of one rank.

    Args:
        tensor: the tensor parallel group, None for one member.
        sequence_parallel: keep values outside attention and MLP cut along the sequence over the tensor group.
        sep: the group over which every sequence is cut outside the attention kernel, None for one member.
    """

    def __init__(self, tensor: Group | None = None, sequence_parallel: bool = False, sep: Group | None = None):
        self.tensor, self.sep = tensor, sep
        self.sequence_parallel = sequence_parallel and tensor is not None

    @property
    def mp_size(self) -> int:
        """Members of the tensor group."""
        return self.tensor.nranks if self.tensor is not None else 1

    @property
    def mp_rank(self) -> int:
        """This rank's place in it."""
        return self.tensor.rank if self.tensor is not None else 0

    def enter(self, x: paddle.Tensor) -> paddle.Tensor:
        """Into a layer cut by columns: [s, b, h] whole (with sequence parallel [s/mp, b, h]) → [s, b, h].

        Backward sums over the group (with sequence parallel, each rank gets the sum of its own part).
        """
        if self.tensor is None:
            return x
        return (_Gather if self.sequence_parallel else _Copy).apply(x, self.tensor)

    def start_whole(self, x: paddle.Tensor, overlap: bool = True) -> Transfer:
        """Starts what `enter` does forward, without a backward pass of its own. A group of several members."""
        assert self.tensor is not None
        if not self.sequence_parallel:
            return Transfer(x, x, None)
        return start_all_gather(_grown(x, self.tensor), x.contiguous(), self.tensor, overlap)

    def start_backward(self, gradient: paddle.Tensor) -> Transfer:
        """Starts what `enter` does backward, in place where nothing is cut: this rank's partial gradient [s, b, h] → the
        gradient of what entered. A group of several members."""
        assert self.tensor is not None
        if not self.sequence_parallel:
            return start_all_reduce(gradient, self.tensor)
        return start_reduce_scatter(_shrunk(gradient, self.tensor), gradient.contiguous(), self.tensor)

    def leave(self, x: paddle.Tensor) -> paddle.Tensor:
        """Out of a layer cut by rows: partial sums [s, b, h] → their sum, whole (with sequence parallel [s/mp, b, h])."""
        if self.tensor is None:
            return x
        return (_Scatter if self.sequence_parallel else _Sum).apply(x, self.tensor)

    def sequence_start(self, length: int) -> int:
        """Position of the first of `length` local places of the sequence outside attention."""
        place = self.sep.rank if self.sep is not None else 0
        if self.sequence_parallel:
            place = place * self.mp_size + self.mp_rank
        return place * length

    def cut_heads(self, x: paddle.Tensor) -> paddle.Tensor:
        """Into the attention kernel: [s/sep, b, n, d] → [s, b, n/sep, d]."""
        return x if self.sep is None else _Exchange.apply(x, self.sep, 2, 0)

    def cut_sequence(self, x: paddle.Tensor) -> paddle.Tensor:
        """Out of it: [s, b, n/sep, d] → [s/sep, b, n, d]."""
        return x if self.sep is None else _Exchange.apply(x, self.sep, 0, 2)


class _Copy(PyLayer):
    """f: identity, backward all-reduce."""

    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor, group: Group) -> paddle.Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
        return _all_reduce(gradient, ctx.group)


class _Sum(PyLayer):
    """g: all-reduce, backward identity."""

    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor, group: Group) -> paddle.Tensor:
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
        return gradient.clone()


class _Gather(PyLayer):
    """All-gather along dim 0, backward reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor, group: Group) -> paddle.Tensor:
        ctx.group = group
        return _all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
        return _reduce_scatter(gradient, ctx.group)


class _Scatter(PyLayer):
    """Reduce-scatter along dim 0, backward all-gather."""

    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor, group: Group) -> paddle.Tensor:
        ctx.group = group
        return _reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
        return _all_gather(gradient, ctx.group)


class _Exchange(PyLayer):
    """All-to-all: dim `cut` is cut over the group, dim `joined` is put together; backward is the reverse."""

    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor, group: Group, cut: int, joined: int) -> paddle.Tensor:
        ctx.group, ctx.dims = group, (cut, joined)
        return _exchange(x, group, cut, joined)

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
        cut, joined = ctx.dims
        return _exchange(gradient, ctx.group, joined, cut)


def _all_reduce(x: paddle.Tensor, group: Group) -> paddle.Tensor:
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x


def _all_gather(x: paddle.Tensor, group: Group) -> paddle.Tensor:
    return start_all_gather(_grown(x, group), x.contiguous(), group, overlap=False).wait()


def _reduce_scatter(x: paddle.Tensor, group: Group) -> paddle.Tensor:
    return start_reduce_scatter(_shrunk(x, group), x.contiguous(), group, overlap=False).wait()


def _grown(x: paddle.Tensor, group: Group) -> paddle.Tensor:
    return paddle.empty([x.shape[0] * group.nranks, *x.shape[1:]], x.dtype)


def _shrunk(x: paddle.Tensor, group: Group) -> paddle.Tensor:
    return paddle.empty([x.shape[0] // group.nranks, *x.shape[1:]], x.dtype)


def _exchange(x: paddle.Tensor, group: Group, cut: int, joined: int) -> paddle.Tensor:
    parts = [part.contiguous() for part in x.split(group.nranks, axis=cut)]
    received = [paddle.empty_like(part) for part in parts]
    dist.alltoall(received, parts, group=group)
    return paddle.concat(received, axis=joined)
