"""Paddle's profiler over a range of updates, as the `Profiler` section says."""

from __future__ import annotations

import logging
import os
from types import TracebackType
from typing import Any

from ppfleetx.config.schema import ProfilerConfig

logger = logging.getLogger("ppfleetx")

_VIEWS = {
    "overview": "OverView",
    "device": "DeviceView",
    "model": "ModelView",
    "dist": "DistributedView",
    "kernel": "KernelView",
    "op": "OperatorView",
    "mem": "MemoryView",
    "memcpy": "MemoryManipulationView",
}


class Profiling:
    """`with Profiling(…) as profiling:` around the training loop, `profiling.step()` after each update.

    Updates `scheduler[0]` to `scheduler[1] - 1` are recorded, counted from the first of this process. Then the rank's
    Chrome trace (`rank<r>_time_….paddle_trace.json`) goes into the folder, the main rank prints the tables, and the
    profiler is off. Does nothing where the section is not enabled.

    Args:
        config: the `Profiler` section.
        output_dir: folder that `profiler_log` is inside of, unless it is absolute.
        rank: global rank.
    """

    def __init__(self, config: ProfilerConfig, output_dir: str, rank: int = 0):
        self._config = config
        self._folder = os.path.join(output_dir, config.profiler_log)
        self._rank = rank
        self._steps = 0
        self._profiler: Any = None

    def __enter__(self) -> Profiling:
        if self._config.enable:
            self._profiler = self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._profiler is None:
            return
        if self._steps > self._config.scheduler[0]:
            self._finish()  # the run ended inside the range
        else:
            logger.warning("the run ended before update %d: nothing was profiled", self._config.scheduler[0])

    def step(self) -> None:
        """An update is done."""
        if self._profiler is None:
            return
        self._steps += 1
        self._profiler.step()
        if self._steps == self._config.scheduler[1]:
            self._finish()

    def _start(self) -> Any:
        from paddle.profiler import Profiler, export_chrome_tracing

        profiler = Profiler(
            scheduler=(self._config.scheduler[0], self._config.scheduler[1]),
            on_trace_ready=export_chrome_tracing(self._folder, f"rank{self._rank}"),
            record_shapes=self._config.record_shapes,
            profile_memory=self._config.profile_memory,
        )
        profiler.start()
        return profiler

    def _finish(self) -> None:
        from paddle.profiler import SortedKeys, SummaryView
        from paddle.profiler.profiler import ProfilerTarget

        profiler, self._profiler = self._profiler, None
        profiler.stop()
        if self._rank:
            return
        logger.info("profile written to %s; open the traces in chrome://tracing", self._folder)
        flags = self._config.summary
        views = [
            getattr(SummaryView, view) for flag, view in _VIEWS.items() if self._config.detailed or getattr(flags, flag)
        ]
        gpu = ProfilerTarget.GPU in profiler.targets
        if views:
            profiler.summary(sorted_by=SortedKeys.GPUTotal if gpu else SortedKeys.CPUTotal, views=views)
