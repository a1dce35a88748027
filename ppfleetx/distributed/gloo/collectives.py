"""Collectives that Paddle's Gloo group lacks or gets wrong, put in on its class, so that a group stays Paddle's own object.

Stands in for most methods of `core.ProcessGroupGloo` (private.py lists them and says when they can go). The signatures
are Paddle's, which differ between methods: with and without a flag `sync_op`, and in some, without it, the input comes
before the output. Every call is over when it returns, whatever `sync_op` says. All members call it alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import paddle
from paddle.base import core

from ppfleetx.distributed.gloo.carriers import REDUCED_AS, carrier, written
from ppfleetx.distributed.gloo.point_to_point import recv, send

if TYPE_CHECKING:
    from paddle import Tensor

_Gloo: Any = core.ProcessGroupGloo  # Any: its methods are replaced
_SUM, _AVG = core.ReduceOp.SUM, core.ReduceOp.AVG
_RAW = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "scatter",
    "scatter_tensor",
    "gather",
)
_raw: dict[str, Any] = {name: getattr(_Gloo, name) for name in _RAW}  # Paddle's, since a module is loaded once


class Done:
    """The task of a call that is over."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


DONE = Done()


def install() -> None:
    """Put the functions below on `core.ProcessGroupGloo`. Local; a second call changes nothing."""
    _Gloo.all_reduce = _Gloo.allreduce = _Gloo.all_reduce_on_calc_stream = all_reduce
    _Gloo.reduce = _Gloo.reduce_on_calc_stream = reduce
    _Gloo.broadcast = _Gloo.broadcast_on_calc_stream = broadcast
    _Gloo.all_gather = _overloaded(all_gather, num_arguments=3)
    _Gloo.all_gather_on_calc_stream = all_gather
    _Gloo.all_gather_into_tensor = _Gloo.all_gather_into_tensor_on_calc_stream = all_gather
    _Gloo.all_gather_partial = _Gloo.all_gather_partial_on_calc_stream = all_gather_partial
    _Gloo.scatter = _overloaded(scatter, num_arguments=4)
    _Gloo.scatter_on_calc_stream = scatter
    _Gloo.scatter_tensor = _Gloo.scatter_tensor_on_calc_stream = scatter
    _Gloo.gather = gather
    _Gloo.reduce_scatter = _Gloo.reduce_scatter_on_calc_stream = reduce_scatter
    _Gloo.reduce_scatter_tensor = _Gloo.reduce_scatter_tensor_on_calc_stream = reduce_scatter
    _Gloo.all_to_all = _Gloo.all_to_all_on_calc_stream = all_to_all
    _Gloo.alltoall = lambda group, tensors, out: all_to_all(group, out, tensors)
    _Gloo.all_to_all_tensor = _Gloo.all_to_all_tensor_on_calc_stream = all_to_all_single
    _Gloo.all_to_all_single = _Gloo.all_to_all_single_on_calc_stream = all_to_all_single
    _Gloo.alltoall_single = lambda group, tensor, out, sizes, out_sizes: all_to_all_single(
        group, out, tensor, out_sizes, sizes
    )


def _overloaded(function: Any, num_arguments: int) -> Any:
    """The method whose arguments are (out, in, …, sync_op), and (in, out, …) where there is one fewer."""

    def method(group: Any, first: Any, second: Any, *rest: Any) -> Done:
        if len(rest) + 2 < num_arguments:
            first, second = second, first
        return function(group, first, second, *rest)

    return method


def all_reduce(group: Any, tensor: Tensor, op: Any = _SUM, sync_op: bool = True) -> Done:
    """Replace `tensor` by its reduction over the group: half precision is summed in float32, AVG is SUM / members.

    Raises:
        TypeError: a dtype that cannot be carried, or the average of integers.
    """
    return _reduced("all_reduce", group, tensor, op)


def reduce(group: Any, tensor: Tensor, destination: int, op: Any = _SUM, sync_op: bool = True) -> Done:
    """`all_reduce` whose result is at member `destination`; the others' tensors are undefined after it."""
    return _reduced("reduce", group, tensor, op, destination)


def _reduced(name: str, group: Any, tensor: Tensor, op: Any, *destination: int) -> Done:
    if op == _AVG and not tensor.is_floating_point():
        raise TypeError(f"{name} over Gloo averages floating point numbers only, not {tensor.dtype}")
    if tensor.size == 0:
        return DONE
    with written(name, [tensor], REDUCED_AS) as (one,):
        _raw[name](group, one, *destination, _SUM if op == _AVG else op, True).wait()
        if op == _AVG:
            one.divide_(paddle.full([], group.size(), one.dtype))
    return DONE


def broadcast(group: Any, tensor: Tensor, source: int, sync_op: bool = True) -> Done:
    """Replace `tensor` by that of member `source`."""
    if tensor.size:
        with written("broadcast", [tensor]) as (one,):
            _raw["broadcast"](group, one, source, True).wait()
    return DONE


def all_gather(group: Any, out: Tensor | Sequence[Tensor], tensor: Tensor, sync_op: bool = True) -> Done:
    """Put every member's `tensor` into `out`: a list, one a member, or a tensor in which they lie end to end."""
    if tensor.size == 0:
        return DONE
    one = carrier("all_gather", tensor)
    if isinstance(out, paddle.Tensor):
        _expect("all_gather", out.size == group.size() * tensor.size, out, tensor)
        with written("all_gather", [out]) as (whole,):
            _raw["all_gather_into_tensor"](group, whole, one, True).wait()
    else:
        with written("all_gather", out) as pieces:
            _raw["all_gather"](group, pieces, one, True).wait()
    return DONE


def all_gather_partial(group: Any, out: Tensor, tensor: Tensor, num_parts: int, part: int) -> Done:
    """Of `tensor`, cut flat into as many parts as members, this one holds `part`; put all of them into `out`."""
    _expect("all_gather_partial", num_parts == group.size() and tensor.size % num_parts == 0, out, tensor)
    with paddle.no_grad():
        return all_gather(group, out, tensor.reshape([num_parts, -1])[part].clone())


def scatter(group: Any, out: Tensor, source: Tensor | Sequence[Tensor], member: int, sync_op: bool = True) -> Done:
    """Replace `out` by its piece of `source` at `member`: a list, or a tensor of equal pieces end to end."""
    if out.size == 0:
        return DONE
    with written("scatter", [out]) as (one,):
        if isinstance(source, paddle.Tensor):
            _raw["scatter_tensor"](group, one, carrier("scatter", source), member, True).wait()
        else:
            _raw["scatter"](group, one, [carrier("scatter", piece) for piece in source], member, True).wait()
    return DONE


def gather(
    group: Any,
    tensor: Tensor,
    out: Sequence[Tensor],
    destination: int,
    sync_op: bool = True,
    use_calc_stream: bool = False,
) -> Done:
    """Put every member's `tensor` into the list `out` at member `destination`."""
    if tensor.size:
        with written("gather", out) as pieces:
            _raw["gather"](group, carrier("gather", tensor), pieces, destination, True, False).wait()
    return DONE


def reduce_scatter(
    group: Any, out: Tensor, source: Tensor | Sequence[Tensor], op: Any = _SUM, sync_op: bool = True
) -> Done:
    """Replace `out` by its piece of the reduction of `source`: a list, whose pieces may differ in size, or a tensor.

    One all-reduce, then a slice: Gloo's all-reduce took 9 ms for 4 MB on 4 ranks, sending pieces and adding them 14.
    """
    if isinstance(source, paddle.Tensor):
        sizes = [out.size] * group.size()
        source = [source]
    else:
        sizes = [piece.size for piece in source]
    rank, start = group.rank(), sum(sizes[: group.rank()])
    with paddle.no_grad():
        total = paddle.concat([piece.flatten() for piece in source])
        _expect("reduce_scatter", total.size == sum(sizes) and sizes[rank] == out.size, out, *source)
        all_reduce(group, total, op)
        out.copy_(total[start : start + out.size].reshape(out.shape), True)
    return DONE


def all_to_all(group: Any, out: Sequence[Tensor], source: Sequence[Tensor], sync_op: bool = True) -> Done:
    """Send `source[i]` to member i and put what it sends into `out[i]`; sizes may differ from pair to pair."""
    me, size = group.rank(), group.size()
    for step in range(1, size):
        peer = (me + step) % size
        if source[peer].size:
            send(group, source[peer], peer)
    _expect("all_to_all", out[me].size == source[me].size, out[me], source[me])
    with paddle.no_grad():
        out[me].copy_(source[me].reshape(out[me].shape), True)
    for step in range(1, size):
        peer = (me - step) % size
        if out[peer].size:
            recv(group, out[peer], peer)
    return DONE


def all_to_all_single(
    group: Any, out: Tensor, tensor: Tensor, out_sizes: Any = (), sizes: Any = (), sync_op: bool = True
) -> Done:
    """`all_to_all` between cuts of dim 0 of two tensors, equal ones unless `sizes` and `out_sizes` are given."""
    if isinstance(out_sizes, bool):  # all_to_all_tensor(out, tensor, sync_op)
        out_sizes = ()
    with paddle.no_grad():
        pieces = [paddle.empty([size, *out.shape[1:]], out.dtype) for size in _cuts(group, out, out_sizes)]
        cuts = _cuts(group, tensor, sizes)
        starts = [sum(cuts[:i]) for i in range(len(cuts))]
        all_to_all(group, pieces, [tensor[start : start + cut] for start, cut in zip(starts, cuts, strict=True)])
        if out.size:
            out.copy_(paddle.concat(pieces), True)
    return DONE


def _cuts(group: Any, tensor: Tensor, sizes: Sequence[int]) -> list[int]:
    """The sizes in which dim 0 of `tensor` is cut over the group."""
    rows, members = tensor.shape[0], group.size()
    cuts = list(sizes) or [rows // members] * members
    if len(cuts) != members or sum(cuts) != rows:
        raise ValueError(f"all_to_all over Gloo: {rows} rows do not fall into {list(sizes) or members} pieces")
    return cuts


def _expect(name: str, right: bool, *tensors: Tensor) -> None:
    if not right:
        raise ValueError(f"{name} over Gloo: sizes do not fit, shapes are {[tensor.shape for tensor in tensors]}")
