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


class Meter:
    """Collects updates and sums them up a window at a time. The clock of the first window starts with the meter.

    Values are read only when a window ends, so that the host does not wait for the device at every update.

    Args:
        tokens_per_update: global_batch_size × seq_len.
        world_size: devices of the run.
        flops_per_token: operations of the model for one token, forward and backward; None: not known.
        peak_flops: operations per second of one device at best; None: not known.
        clock: seconds, never going back.
    """

    def __init__(
        self,
        tokens_per_update: int,
        world_size: int,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.tokens_per_update = tokens_per_update
        self.world_size = world_size
        self.flops_per_token = flops_per_token
        self.peak_flops = peak_flops
        self._clock = clock
        self._start()

    def update(self, step: StepRecord) -> None:
        """Adds one update."""
        self._steps.append(step)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leaves the time spent inside (evaluation, saving) out of the window."""
        begin = self._clock()
        try:
            yield
        finally:
            self._began += self._clock() - begin

    def window(self) -> Window:
        """Sums up the updates since the last call (at least one) and starts the next window. Waits for the device."""
        losses = [float(step.loss) for step in self._steps]
        norms = [float(step.grad_norm) for step in self._steps if step.grad_norm is not None and not step.found_inf]
        cost_s = max(self._clock() - self._began, 1e-9) / len(self._steps)
        tokens_per_second = self.tokens_per_update / cost_s
        each = tokens_per_second / self.world_size
        mfu = None
        if self.flops_per_token and self.peak_flops:
            mfu = self.flops_per_token * each / self.peak_flops
        result = Window(
            loss=_mean(losses),
            grad_norm=_mean(norms) if norms else None,
            found_inf=sum(bool(step.found_inf) for step in self._steps),
            avg_batch_cost_s=cost_s,
            tokens_per_second=tokens_per_second,
            tokens_per_second_per_device=each,
            mfu=mfu,
        )
        self._start()
        return result

    def _start(self) -> None:
        self._steps: list[StepRecord] = []
        self._began = self._clock()


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
