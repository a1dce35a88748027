"""Which fused kernels there are: the device that values lie on decides, never what Paddle was built with."""

from __future__ import annotations

from functools import cache

import paddle
from paddle.base import core


def has_kernel(operator: str, x: paddle.Tensor) -> bool:
    """Whether Paddle has a kernel of this operator for the device of `x`. Not asked for CPUs: there it has none of the fused
    kernels, though it registers some that only raise (3.3.1)."""
    return not x.place.is_cpu_place() and _has_kernel(operator, str(x.place).partition(":")[0])


@cache
def _has_kernel(operator: str, place: str) -> bool:
    """`place` is such as "Place(gpu"."""
    kernels = core._get_all_register_op_kernels("phi")  # type: ignore[attr-defined]  # 3.3.1
    return any(place in kernel for kernel in kernels.get(operator, ()))
