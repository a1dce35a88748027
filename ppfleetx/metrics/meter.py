"""Speed and means over the updates between two log lines."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import SupportsFloat

from ppfleetx.metrics.records import Window

#: dense half precision peak of a device, operations per second, from the makers' data sheets; the first name that
#: stands in the device's name as a word counts
_PEAK_FLOPS = (
    ("B200", 2250e12), ("H200", 989e12), ("H100 PCIe", 756e12), ("H100 NVL", 835e12), ("H100", 989e12), ("H800", 989e12),
    ("H20", 148e12), ("A100", 312e12), ("A800", 312e12), ("A10", 125e12), ("L40S", 362e12), ("L20", 119e12),
    ("V100", 125e12), ("T4", 65e12),
)  # fmt: skip


def peak_flops(device_name: str, half_precision: bool) -> float | None:
    """Peak operations per second of one device, or None where it is not known (CPUs, float32 runs).

    Args:
        device_name: as `paddle.device.cuda.get_device_name()` gives it.
        half_precision: whether the run's matmuls are float16 or bfloat16.
    """
    if not half_precision:
        return None
    return next((peak for name, peak in _PEAK_FLOPS if re.search(rf"\b{name}\b", device_name)), None)


@dataclass(frozen=True)
class StepRecord:
    """What one update gave.

    Attributes:
        loss: mean loss over the update's micro-batches and data ranks: a number or a 0-d tensor.
        grad_norm: global gradient norm before clipping, likewise; None: not known.
        found_inf: whether the update was skipped because of an fp16 overflow.
    """

    loss: SupportsFloat
    grad_norm: SupportsFloat | None = None
    found_inf: bool = False


@dataclass
class Sums:
    """What the updates of a window sum up to, so far. A checkpoint carries it, so that a window does not depend on where a run
    was resumed.

    Attributes:
        updates: so many.
        loss: of their losses.
        found_inf: updates that were skipped.
        norms: updates that were not and whose gradient norm is known, …
        grad_norm: … and the sum of their norms.
    """

    updates: int = 0
    loss: float = 0.0
    found_inf: int = 0
    norms: int = 0
    grad_norm: float = 0.0

    def add(self, step: StepRecord) -> None:
        """One more update. One addition after another: in a resumed run the last digit is the same."""
        self.updates += 1
        self.loss += float(step.loss)
        self.found_inf += bool(step.found_inf)
        if step.grad_norm is not None and not step.found_inf:
            self.norms += 1
            self.grad_norm += float(step.grad_norm)


class Meter:
    """Sums updates up, a window at a time. The clock of the first window starts with the meter.

    Args:
        tokens_per_update: global_batch_size × seq_len.
        world_size: devices of the run.
        flops_per_token: operations of the model for one token, forward and backward; None: not known.
        peak_flops: operations per second of one device at best; None: not known.
        sums: of a window that an earlier process began: its means are over all of it, its speed over what this one does.
        clock: seconds, never going back.

    Attributes:
        sums: of the present window.
    """

    def __init__(
        self,
        tokens_per_update: int,
        world_size: int,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
        sums: Sums | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.tokens_per_update = tokens_per_update
        self.world_size = world_size
        self.flops_per_token = flops_per_token
        self.peak_flops = peak_flops
        self._clock = clock
        self.start(sums)

    def start(self, sums: Sums | None = None) -> None:
        """Begins a window, or goes on with one."""
        self.sums = Sums() if sums is None else sums
        self._updates, self._began = 0, self._clock()

    def update(self, step: StepRecord) -> None:
        """Adds one update. Waits for the device where its values are tensors there."""
        self.sums.add(step)
        self._updates += 1

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leaves the time spent inside (evaluation, saving) out of the window."""
        begin = self._clock()
        try:
            yield
        finally:
            self._began += self._clock() - begin

    def window(self) -> Window | None:
        """Sums up the updates of the window so far; None if this meter has seen none."""
        if not self._updates:
            return None
        sums = self.sums
        cost_s = max(self._clock() - self._began, 1e-9) / self._updates
        tokens_per_second = self.tokens_per_update / cost_s
        each = tokens_per_second / self.world_size
        mfu = None
        if self.flops_per_token and self.peak_flops:
            mfu = self.flops_per_token * each / self.peak_flops
        return Window(
            updates=sums.updates,
            loss=sums.loss / sums.updates,
            grad_norm=sums.grad_norm / sums.norms if sums.norms else None,
            found_inf=sums.found_inf,
            avg_batch_cost_s=cost_s,
            tokens_per_second=tokens_per_second,
            tokens_per_second_per_device=each,
            mfu=mfu,
        )
