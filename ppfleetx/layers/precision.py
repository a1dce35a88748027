"""Arithmetic that stays in float32 whatever the run's mixed precision."""

from __future__ import annotations

import contextlib
from typing import Any

import paddle


def full_precision(x: paddle.Tensor) -> contextlib.AbstractContextManager[Any]:
    """A context in which float32 values are not cast to half, as autocast at level O2 would; it exists beside a CPU only."""
    if x.place.is_cpu_place():
        return contextlib.nullcontext()
    return paddle.amp.auto_cast(enable=False)
