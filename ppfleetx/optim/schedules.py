"""Learning-rate schedules: pure functions of the updates done, the same for every batch size and layout.

A resume therefore needs no saved state but the number of updates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ppfleetx.config.schema import LRConfig


@dataclass(frozen=True)
class Schedule:
    """`schedule(k)` is the rate of the next update once k updates are done (k from 0).

    A warm-up rises from 0 in a straight line, so the first update uses rate 0; without one it uses `max_lr`.

    Attributes:
        name: shape after the warm-up, a key of `SHAPES`.
        max_lr, min_lr: peak and final rate.
        warmup_updates: updates of the warm-up; need not be whole.
        decay_updates: updates until `min_lr`, warm-up included.
        fall_updates: WarmupStableDecay only: updates of the fall at the end of `decay_updates`; need not be whole.
    """

    name: str
    max_lr: float
    min_lr: float
    warmup_updates: float
    decay_updates: int
    fall_updates: float

    def __call__(self, k: int) -> float:
        if k < self.warmup_updates:
            return self.max_lr * k / self.warmup_updates
        share = SHAPES[self.name](self, k)
        return self.max_lr if share == 1 else self.min_lr + (self.max_lr - self.min_lr) * share


def _cosine(schedule: Schedule, k: int) -> float:
    return 0.5 * (math.cos(math.pi * (1 - _linear(schedule, k))) + 1)


def _linear(schedule: Schedule, k: int) -> float:
    return max(schedule.decay_updates - k, 0) / (schedule.decay_updates - schedule.warmup_updates)


def _constant(schedule: Schedule, k: int) -> float:
    return 1.0


def _stable(schedule: Schedule, k: int) -> float:
    return min(max(schedule.decay_updates - k, 0) / schedule.fall_updates, 1.0)


#: share of max_lr - min_lr that is left after k updates, k past the warm-up
SHAPES: dict[str, Callable[[Schedule, int], float]] = {
    "CosineAnnealingWithWarmupDecay": _cosine,
    "LinearDecayWithWarmup": _linear,
    "ConstantWithWarmup": _constant,
    "WarmupStableDecay": _stable,
}


def build_schedule(lr: LRConfig, num_updates: int) -> Schedule:
    """The schedule of a run.

    Args:
        lr: `Optimizer.lr`; warm-up and fall are shares of `decay_steps`, not rounded to whole updates.
        num_updates: updates of the run, from its start; stands in for `decay_steps` where that is null.
    """
    decay = max(num_updates, 1) if lr.decay_steps is None else lr.decay_steps
    return Schedule(lr.name, lr.max_lr, lr.min_lr, lr.warmup_rate * decay, decay, lr.decay_rate * decay)
