"""The one writer of a run's log: console, `metrics.jsonl` and VisualDL."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from ppfleetx.metrics.jsonl import MetricsFile, finite, move_aside
from ppfleetx.metrics.records import Record
from ppfleetx.metrics.visualdl_file import VisualDLFile

logger = logging.getLogger("ppfleetx")


class MetricsWriter:
    """Writes each record as a console line, a JSON line and VisualDL points. One process of a run makes one: rank 0.

    A VisualDL that cannot be imported or written is switched off with one warning, and records of `metrics.jsonl` wait in
    memory for a disk that is full: training goes on.

    Args:
        output_dir: folder of the run; made if absent. Gets `metrics.jsonl` and `visualdl/`.
        resume_step: updates done at the start: later records are moved to `metrics.jsonl.old-<n>` and VisualDL's series
            are rebuilt from the others, so that each step stands once. None or 0: a fresh start, which moves the log of
            an earlier run in the same folder aside.
        visualdl: whether to write VisualDL points.
        wall_clock: seconds since 1970; goes into each record as `time`.

    Attributes:
        kept: the records that were in `metrics.jsonl` already and still hold.
    """

    def __init__(
        self,
        output_dir: str,
        *,
        resume_step: int | None = None,
        visualdl: bool = True,
        wall_clock: Callable[[], float] = time.time,
    ):
        os.makedirs(output_dir, exist_ok=True)
        self._wall_clock = wall_clock
        self._jsonl = MetricsFile(output_dir, resume_step)
        self.kept = self._jsonl.kept
        self._visualdl: VisualDLFile | None = None
        if visualdl:
            self._open_visualdl(os.path.join(output_dir, "visualdl"), fresh=not resume_step)

    def _open_visualdl(self, folder: str, fresh: bool) -> None:
        try:
            if fresh and os.path.exists(folder):
                move_aside(folder)
            self._visualdl = VisualDLFile(folder, () if fresh else self._jsonl.kept)
        except Exception as error:
            self._without_visualdl(error)

    def _without_visualdl(self, error: Exception) -> None:
        self._visualdl = None
        logger.warning("no VisualDL log from here on (%s: %s); metrics.jsonl is complete", type(error).__name__, error)

    def write(self, record: Record) -> None:
        """Logs one record."""
        logger.info("%s", record.line())
        head = {"kind": record.kind, "step": record.step, "time": self._wall_clock()}
        values: dict[str, Any] = head | finite(record.values())
        self._jsonl.write(values)
        if self._visualdl is not None:
            try:
                self._visualdl.write(values)
            except Exception as error:
                self._without_visualdl(error)

    def close(self) -> None:
        """Closes the files."""
        self._jsonl.close()
        if self._visualdl is not None:
            self._visualdl.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
