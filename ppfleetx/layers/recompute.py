"""Recomputation: which part of a block is computed again in the backward pass instead of being kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
from paddle.distributed.fleet.utils import recompute


class RecomputePlan:
    """Answers, for each block, how to call each of its parts.

    Args:
        granularity: "full" (the block), "full_attn" (its attention), "core_attn" (softmax(q·k)·v), or None (nothing).
        exempt: numbers of blocks that keep everything.
    """

    def __init__(self, granularity: str | None, exempt: tuple[int, ...] = ()):
        self.granularity = granularity
        self.exempt = frozenset(exempt)

    def caller(self, part: str, block: int) -> Callable[..., Any]:
        """A function `call(fn, *args)`: plain, or recomputing when `part` of this block is to be recomputed.

        Dropout draws the same masks again: Paddle's `recompute` restores the default stream and the tracker's.
        """
        if part != self.granularity or block in self.exempt:
            return _plain
        return _recompute


def _recompute(function: Callable[..., Any], *args: paddle.Tensor) -> Any:
    """Paddle's `recompute` gives gradients only where one of `args` has one (3.3.1). After frozen layers none has, and what is
    trained inside would get no gradient, with no more than a warning."""
    if paddle.is_grad_enabled() and all(tensor.stop_gradient for tensor in args):
        args = tuple(tensor.detach() for tensor in args)
        args[0].stop_gradient = False
    return recompute(function, *args)


def _plain(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)
