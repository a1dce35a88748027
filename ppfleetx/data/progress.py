"""How far a long command of this room has come, and a bar that shows it on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any


@dataclass(frozen=True)
class Progress:
    """A moment of a long command.

    Attributes:
        phase: what it is doing ("reading", "tokenizing", "shuffling", "training"); "" between two of them.
        done: of `total`, in `unit`s; bytes of input are counted as they lie on the disk, compressed or not.
        total: None where it is not known (a pipe), or where nothing tells how far the work has come.
        unit: "B" for bytes, or what is counted.
        note: further counts, for people.
    """

    phase: str
    done: int
    total: int | None
    unit: str = "B"
    note: str = ""


#: what long commands call from time to time
OnProgress = Callable[[Progress], object]

#: a moment without a total whose length nothing tells: the clock is all there is to show
_CLOCK_ONLY = "{desc}: {elapsed}{postfix}"


class TerminalBar:
    """Shows a command's progress, a bar a phase, where standard error is a terminal. A context manager and an `OnProgress`."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._phase = ""

    def __call__(self, progress: Progress) -> None:
        if not sys.stderr.isatty():
            return
        if progress.phase != self._phase:
            self._start(progress)
        if self._bar is None:
            return
        self._bar.set_postfix_str(progress.note, refresh=False)
        self._bar.update(progress.done - self._bar.n)
        if not progress.unit:  # its clock goes on although nothing is counted
            self._bar.refresh()

    def _start(self, progress: Progress) -> None:
        from tqdm import tqdm

        self.close()
        self._phase = progress.phase
        if not progress.phase:
            return
        self._bar = tqdm(
            desc=progress.phase,
            total=progress.total,
            unit=progress.unit,
            unit_scale=True,
            dynamic_ncols=True,
            bar_format=None if progress.unit else _CLOCK_ONLY,
        )

    def close(self) -> None:
        """Ends the bar of the present phase; it stays on the screen as it was last."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> TerminalBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
