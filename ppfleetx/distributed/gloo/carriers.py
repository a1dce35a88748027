"""What Gloo can carry: contiguous tensors of some dtypes. Others travel as another tensor, or are refused by name.

Seen in Paddle 3.3.1: a dtype that Gloo does not know (int16, complex64) ends the process without a word; float16 sums
and products come out as inf; a tensor that is not contiguous is refused. Goes when `tests/unit/distributed/
collectives_worker.py` passes with `carrier` returning its tensor as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import paddle

if TYPE_CHECKING:
    from paddle import Tensor

#: dtypes that Gloo moves as they are
CARRIED = (
    paddle.float32,
    paddle.float64,
    paddle.float16,
    paddle.bfloat16,
    paddle.int8,
    paddle.uint8,
    paddle.int32,
    paddle.int64,
    paddle.bool,
)
#: dtypes that travel as another one
MOVED_AS: Mapping[Any, Any] = {paddle.int16: paddle.int32}
#: dtypes that are reduced as another one; bfloat16 too, so that a sum is rounded once and not at every rank
REDUCED_AS: Mapping[Any, Any] = {**MOVED_AS, paddle.float16: paddle.float32, paddle.bfloat16: paddle.float32}


def carrier(name: str, tensor: Tensor, travels_as: Mapping[Any, Any] = MOVED_AS) -> Tensor:
    """A tensor of the same values that Gloo can carry: `tensor` itself where possible, else a copy.

    Raises:
        TypeError: no way to carry its dtype; names the dtype and the collective `name`.
    """
    dtype = travels_as.get(tensor.dtype, tensor.dtype)
    if dtype not in CARRIED:
        known = ", ".join(_plain(one) for one in (*CARRIED, *MOVED_AS))
        raise TypeError(f"{name} over Gloo cannot carry {_plain(tensor.dtype)}, only {known}")
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    return tensor if tensor.dtype == dtype else tensor.astype(dtype)


@contextmanager
def written(name: str, tensors: Sequence[Tensor], travels_as: Mapping[Any, Any] = MOVED_AS) -> Iterator[list[Tensor]]:
    """The carriers of `tensors`; what has been written to them by the end of the block is in `tensors` after it."""
    with paddle.no_grad():
        carriers = [carrier(name, tensor, travels_as) for tensor in tensors]
        yield carriers
        for tensor, carried in zip(tensors, carriers, strict=True):
            deliver(carried, tensor)


def deliver(carried: Tensor, tensor: Tensor) -> None:
    """Write the values of `carried` to `tensor`, whose carrier it is; nothing to do where they are the same object."""
    if carried is not tensor:
        with paddle.no_grad():
            tensor.copy_(carried.astype(tensor.dtype), True)


def _plain(dtype: Any) -> str:
    return str(dtype).rpartition(".")[2]
