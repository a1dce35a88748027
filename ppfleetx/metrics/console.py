"""What the terminal shows: log lines in PaddleFleetX's form on standard output, a progress bar on standard error."""

from __future__ import annotations

import logging
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TextIO

LOGGER = "ppfleetx"
#: a logger whose INFO lines come out on every rank, for what concerns each rank (`Debug.log_sample_ids`)
ALL_RANKS_LOGGER = "ppfleetx.all_ranks"
_FORMAT = "[%(asctime)s] [%(levelname)8s] - %(message)s"


class _ConsoleHandler(logging.StreamHandler):
    """Writes to whatever `sys.stdout` is now, flushes each line, and takes a progress bar out of the way meanwhile."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(logging.Formatter(_FORMAT))

    @property
    def stream(self) -> TextIO:
        return sys.stdout

    def emit(self, record: logging.LogRecord) -> None:
        with _bars_out_of_the_way():
            super().emit(record)


def setup_logging(is_main: bool) -> None:
    """Sends the log of ppfleetx to standard output: all from INFO on the main rank, from WARNING on the others.

    May be called again. Lines look like `[2026-01-31 12:00:00,123] [    INFO] - message`.
    """
    logger = logging.getLogger(LOGGER)
    logger.handlers[:] = [_ConsoleHandler()]
    logger.setLevel(logging.INFO if is_main else logging.WARNING)
    logger.propagate = False
    logging.getLogger(ALL_RANKS_LOGGER).setLevel(logging.INFO)


class Progress:
    """A progress bar of updates, shown only where standard error is a terminal.

    Args:
        total: updates of the run.
        done: updates done at the start.
        enabled: False: never shown (ranks other than the main one).
    """

    def __init__(self, total: int, done: int = 0, enabled: bool = True):
        self._bar: Any = None
        if enabled and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, initial=done, file=sys.stderr, unit="step", desc="train", dynamic_ncols=True)

    def update(self, done: int, loss: float | None = None) -> None:
        """Moves the bar to `done` updates; the last loss given stays beside it."""
        if self._bar is None:
            return
        if loss is not None:
            self._bar.set_postfix_str(f"loss={loss:.4f}", refresh=False)
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Ends the bar's line."""
        if self._bar is not None:
            self._bar.close()


def _bars_out_of_the_way() -> AbstractContextManager[None]:
    tqdm = sys.modules.get("tqdm")  # loaded or not: without it there is no bar
    return tqdm.tqdm.external_write_mode(file=sys.stdout) if tqdm is not None else nullcontext()
