"""Ending a run early in an orderly way: after an update, on all ranks alike, with a checkpoint.

What asks for it: SIGTERM (from the launcher, which kills 30 s later, or a batch system), SIGUSR1 to any rank, the file
`output_dir/STOP`, `Engine.save_load.stop_after_s`. A signal only sets a flag; nothing is saved inside a handler.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from ppfleetx.distributed import ParallelContext

#: a rank is asked to stop by these
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
#: seconds between looks for the file, which may be on a slow network disk
_LOOK_S = 0.5

logger = logging.getLogger("ppfleetx")


class StopRequests:
    """Whether, and after which update, the run is to stop. Every rank holds one and asks after every update.

    Ranks must stop after the same update. So rank 0 decides: after update n it announces "stop after n + 1"; no rank can end
    update n + 1 before rank 0 has begun it, as its sums need them all, so every rank sees the notice in time. One process
    stops at once. Costs one request to the job's store an update.

    Args:
        context: this rank's place.
        output_dir: where the file STOP is looked for, and removed when it is obeyed.
        stop_after_s: seconds from now; None: no limit.
    """

    def __init__(self, context: ParallelContext, output_dir: Path, stop_after_s: float | None = None):
        self._context, self._file = context, output_dir / "STOP"
        self._asked, self._decided = context.notice("stop asked"), context.notice("stop decided")
        self._deadline = None if stop_after_s is None else time.monotonic() + stop_after_s
        self._signal: str | None = None
        self._next_look = 0.0

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Signals are heard inside (in the main thread; elsewhere Python allows no handlers). A file that comes too late, when
        the run ends anyway, is removed at the end."""
        with self._handlers():
            yield
        if self._context.is_main and self._take_file():
            logger.info("%s came too late: the run was at its end", self._file)

    @contextlib.contextmanager
    def _handlers(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._hear) for number in SIGNALS}
        for number in SIGNALS:  # a request to the job's store that is interrupted is an error there (Paddle 3.3.1)
            signal.siginterrupt(number, False)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def after_update(self, step: int) -> str | None:
        """Why the run is to stop after this update; None: it goes on."""
        if self._signal is not None:
            self._asked.post(f"{self._signal} to rank {self._context.topology.device_rank}")
            self._signal = None
        found = self._decided.read()
        if found is None and self._context.is_main and (reason := self._reason()) is not None:
            alone = self._context.topology.world_size == 1
            found = f"{step if alone else step + 1} {reason}"
            self._decided.post(found)
        if found is None:
            return None
        at, _, reason = found.partition(" ")
        assert step <= int(at), f"an update after the decided end: {found}"
        return reason if step == int(at) else None

    def _reason(self) -> str | None:
        """What asks for a stop, on rank 0."""
        now = time.monotonic()
        if self._deadline is not None and now >= self._deadline:
            return "Engine.save_load.stop_after_s is over"
        if now >= self._next_look:
            self._next_look = now + _LOOK_S
            if self._take_file():
                return f"{self._file} was there"
        return self._asked.read()

    def _take_file(self) -> bool:
        """Whether the file is there; it is removed."""
        try:
            if not self._file.exists():
                return False
        except OSError:  # the disk has its troubles; the next look may tell
            return False
        try:
            self._file.unlink(missing_ok=True)
        except OSError as error:
            logger.warning(
                "%s cannot be removed, so it will stop the next start as well: %s", self._file, error.strerror
            )
        return True

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._signal = signal.Signals(number).name
