"""Collectives that Paddle's Gloo group lacks or gets wrong, put in on its class, so that a group stays Paddle's own object.

Stands in for most methods of `core.ProcessGroupGloo` (private.py lists them and says when they can go). The signatures
are Paddle's, which differ between methods: with and without a flag `sync_op`, and in some, without it, the input comes
before the output. Every call is over when it returns, whatever `sync_op` says. All members call it alike.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import paddle
from paddle.base import core

from ppfleetx.distributed.gloo.carriers import REDUCED_AS, carrier, written
from ppfleetx.distributed.gloo.point_to_point import DONE, Done, recv, send

if TYPE_CHECKING:
    from paddle import Tensor

_Gloo: Any = core.ProcessGroupGloo  # Any: its methods are replaced
_SUM, _AVG = core.ReduceOp.SUM, core.ReduceOp.AVG
_FOLD: dict[Any, Any] = {
    _SUM: paddle.add,
    _AVG: paddle.add,
    core.ReduceOp.PRODUCT: paddle.multiply,
    core.ReduceOp.MAX: paddle.maximum,
    core.ReduceOp.MIN: paddle.minimum,
}
#: dtypes that are reduced here as another one, for which those functions have a kernel; a sum of booleans is `or`
_FOLDED_AS = {**REDUCED_AS, paddle.int8: paddle.int32, paddle.uint8: paddle.int32, paddle.bool: paddle.int32}
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


def install() -> None:
    """Put the functions below on `core.ProcessGroupGloo`. Local; a second call changes nothing."""
    _Gloo.all_reduce = _Gloo.allreduce = _Gloo.all_reduce_on_calc_stream = all_reduce
    _Gloo.reduce = _Gloo.reduce_on_calc_stream = reduce
    _Gloo.broadcast = _Gloo.broadcast_on_calc_stream = broadcast
    _Gloo.all_gather = all_gather_overloaded
    _Gloo.all_gather_on_calc_stream = all_gather
    _Gloo.all_gather_into_tensor = _Gloo.all_gather_into_tensor_on_calc_stream = all_gather
    _Gloo.all_gather_partial = _Gloo.all_gather_partial_on_calc_stream = all_gather_partial
    _Gloo.scatter = scatter_overloaded
    _Gloo.scatter_on_calc_stream = scatter
    _Gloo.scatter_tensor = _Gloo.scatter_tensor_on_calc_stream = scatter
    _Gloo.gather = gather
    _Gloo.reduce_scatter = _Gloo.reduce_scatter_on_calc_stream = reduce_scatter
    _Gloo.reduce_scatter_tensor = _Gloo.reduce_scatter_tensor_on_calc_stream = reduce_scatter
    _Gloo.all_to_all = _Gloo.all_to_all_on_calc_stream = all_to_all
    _Gloo.alltoall = alltoall
    _Gloo.all_to_all_tensor = _Gloo.all_to_all_tensor_on_calc_stream = all_to_all_tensor
    _Gloo.all_to_all_single = _Gloo.all_to_all_single_on_calc_stream = all_to_all_single
    _Gloo.alltoall_single = alltoall_single


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
    _check_average(name, tensor, op)
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


def all_gather_overloaded(group: Any, first: Any, second: Any, *sync_op: bool) -> Done:
    """`all_gather` of (out, tensor, sync_op) or (tensor, out)."""
    return all_gather(group, first, second) if sync_op else all_gather(group, second, first)


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


def scatter_overloaded(group: Any, first: Any, second: Any, member: int, *sync_op: bool) -> Done:
    """`scatter` of (out, source, member, sync_op) or (source, out, member)."""
    return scatter(group, first, second, member) if sync_op else scatter(group, second, first, member)


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

    An all-to-all, then a reduction here, in the order of the members: half as many bytes as an all-reduce.

    Raises:
        TypeError: as for `all_reduce`.
        ValueError: sizes that do not fit.
    """
    _check_average("reduce_scatter", out, op)
    members = group.size()
    with paddle.no_grad():
        if isinstance(source, paddle.Tensor):
            _expect("reduce_scatter", source.size == out.size * members, out, source)
            flat = carrier("reduce_scatter", source, _FOLDED_AS).flatten()
            pieces = [flat[out.size * i : out.size * (i + 1)] for i in range(members)]
        else:
            _expect("reduce_scatter", source[group.rank()].size == out.size, out, *source)
            pieces = [carrier("reduce_scatter", piece, _FOLDED_AS).flatten() for piece in source]
        received = [paddle.empty([out.size], pieces[0].dtype) for _ in range(members)]
        all_to_all(group, received, pieces)
        total = functools.reduce(_FOLD[op], received)
        if op == _AVG:
            total = total / members
        out.copy_(total.reshape(out.shape).astype(out.dtype), True)
    return DONE


def all_to_all(group: Any, out: Sequence[Tensor], source: Sequence[Tensor], sync_op: bool = True) -> Done:
    """Send `source[i]` to member i and put what it sends into `out[i]`; sizes may differ from pair to pair."""
    me, size = group.rank(), group.size()
    _expect("all_to_all", len(out) == len(source) == size and out[me].size == source[me].size, *out, *source)
    for peer in ((me + step) % size for step in range(1, size)):
        send(group, source[peer], peer)
    with paddle.no_grad():
        out[me].copy_(source[me].reshape(out[me].shape), True)
    for peer in ((me - step) % size for step in range(1, size)):
        recv(group, out[peer], peer)
    return DONE


def alltoall(group: Any, source: Sequence[Tensor], out: Sequence[Tensor]) -> Done:
    """`all_to_all`, the input first."""
    return all_to_all(group, out, source)


def all_to_all_tensor(group: Any, out: Tensor, tensor: Tensor, sync_op: bool = True) -> Done:
    """`all_to_all` between equal cuts of dim 0 of two tensors."""
    return all_to_all_single(group, out, tensor, [], [])


def all_to_all_single(
    group: Any, out: Tensor, tensor: Tensor, out_sizes: Sequence[int], sizes: Sequence[int], sync_op: bool = True
) -> Done:
    """`all_to_all` between cuts of dim 0 of two tensors, of these sizes; without sizes, of equal ones."""
    with paddle.no_grad():
        received = [paddle.empty([rows, *out.shape[1:]], out.dtype) for rows in _cuts(group, out, out_sizes)]
        cuts = _cuts(group, tensor, sizes)
        stops = itertools.accumulate(cuts)
        pieces = [tensor[stop - rows : stop] for rows, stop in zip(cuts, stops, strict=True)]
        all_to_all(group, received, pieces)
        if out.size:
            out.copy_(paddle.concat(received), True)
    return DONE


def alltoall_single(group: Any, tensor: Tensor, out: Tensor, sizes: Sequence[int], out_sizes: Sequence[int]) -> Done:
    """`all_to_all_single`, the input first."""
    return all_to_all_single(group, out, tensor, out_sizes, sizes)


def _cuts(group: Any, tensor: Tensor, sizes: Sequence[int]) -> list[int]:
    """The sizes in which dim 0 of `tensor` is cut over the group."""
    rows, members = tensor.shape[0], group.size()
    cuts = list(sizes) or [rows // members] * members
    if len(cuts) != members or sum(cuts) != rows:
        raise ValueError(f"all_to_all over Gloo: {rows} rows do not fall into {list(sizes) or members} pieces")
    return cuts


def _check_average(name: str, tensor: Tensor, op: Any) -> None:
    if op == _AVG and not tensor.is_floating_point():
        raise TypeError(f"{name} over Gloo averages floating point numbers only, not {tensor.dtype}")


def _expect(name: str, right: bool, *tensors: Tensor) -> None:
    if not right:
        raise ValueError(f"{name} over Gloo: sizes do not fit, shapes are {[tensor.shape for tensor in tensors]}")
