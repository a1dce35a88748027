"""What happens when a run fails after its start: one record a rank, and the earliest of them shown."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paddle

from ppfleetx.checkpoint.files import write_json
from ppfleetx.config import Config, Loaded, Problem, UserError, rank_of_launch
from ppfleetx.distributed.cpu import set_threads
from ppfleetx.engine.command import report
from ppfleetx.metrics.console import setup_logging

logger = logging.getLogger("ppfleetx")

#: Paddle's flags for `Debug.deterministic`; CPU kernels are deterministic as they are
_DETERMINISTIC = {"FLAGS_cudnn_deterministic": True, "FLAGS_embedding_deterministic": 1}
#: exit code of a run that failed after its start
EXIT_FAILURE = 1
#: exit code of a run that went on to its end, or was stopped, while a checkpoint could not be saved
EXIT_SAVE_FAILED = 74
#: exit code of a run that was asked to stop before its end (see engine/stop.py), and saved
EXIT_STOPPED = 75
#: exit code of a run that Ctrl-C ended
EXIT_INTERRUPTED = 130
#: a rank that fails because another died waits this long for the other's record
_GRACE_S = 1.0


class RunError(Exception):
    """A failure of the run that its message explains (a non-finite loss, say); shown without a traceback."""


def guarded(loaded: Loaded, work: Callable[[Config], int]) -> int:
    """Does `work` with the configuration and turns what goes wrong into messages and an exit code.

    What `work` returns: 0, done, or an EXIT_… of a run that went on. 2: a user's mistake, shown without traceback.
    130: interrupted. 1: anything else, recorded in `error.rankN.json`.
    """
    config, rank, started = loaded.config, rank_of_launch(), time.time()
    folder = log_folder(config.Engine.save_load.output_dir)
    setup_logging(is_main=rank == 0)
    for warning in loaded.warnings:
        logger.info("warning: %s", warning)
    try:
        _prepare(folder, rank)
        _set_flags(config)
        set_threads(config)
        return work(config)
    except UserError as error:
        return report(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        return EXIT_INTERRUPTED
    except Exception as error:
        record(error, folder, rank, step=getattr(error, "step", 0))
        return explain(error, folder, rank, started)


def _set_flags(config: Config) -> None:
    """Sets Paddle's flags: those of `Debug.deterministic`, then the user's."""
    if config.Debug.deterministic and config.Global.device == "gpu":
        paddle.set_flags(_DETERMINISTIC)
    for name, value in config.Global.flags.items():
        try:
            paddle.set_flags({name: value})
        except (ValueError, TypeError, RuntimeError):
            rule = "Paddle must have a flag of this name, which takes this value"
            raise UserError(Problem(f"Global.flags.{name}", value, rule)) from None


def log_folder(output_dir: str) -> Path:
    """Where records go: the launcher's log folder, or the run's own."""
    return Path(os.environ.get("PADDLE_LOG_DIR") or os.path.expanduser(output_dir))


def record(error: BaseException, folder: Path, rank: int, step: int) -> None:
    """Writes `error.rankN.json`: time, step, error, traceback."""
    folder.mkdir(parents=True, exist_ok=True)
    entry = {
        "time": time.time(),
        "rank": rank,
        "step": step,
        "error": f"{type(error).__name__}: {error}",
        "traceback": traceback.format_exception(error),
    }
    write_json(folder / f"error.rank{rank}.json", entry)


def _prepare(folder: Path, rank: int) -> None:
    """Removes this rank's record of an earlier run, which is not the cause of a later failure. Leaves no folder behind.

    Raises:
        UserError: the folder cannot be written.
    """
    try:
        made = [place for place in (folder, *folder.parents) if not place.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        for place in made:
            with contextlib.suppress(OSError):  # another rank uses it already
                place.rmdir()
        (folder / f"error.rank{rank}.json").unlink(missing_ok=True)
    except OSError as error:
        key, rule = "Engine.save_load.output_dir", f"the folder cannot be written: {error.strerror}"
        raise UserError(Problem(key, str(folder), rule)) from None


def explain(error: BaseException, folder: Path, rank: int, started: float) -> int:
    """Prints why the run failed, and gives the exit code.

    A rank whose peer died sees only a broken connection: it shows the earliest record of this run instead.

    Args:
        error: what this rank saw, already recorded.
        folder: see `log_folder`.
        rank: this rank.
        started: when this run started (time.time()); older records are not its own.
    """
    if isinstance(error, RunError):
        print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_FAILURE
    traceback.print_exception(error, file=sys.stderr)
    first = _earliest(folder, started)
    deadline = time.monotonic() + _GRACE_S
    while (first is None or first["rank"] == rank) and _from_peer(error) and time.monotonic() < deadline:
        time.sleep(0.02)
        first = _earliest(folder, started)
    if first is not None and first["rank"] != rank:
        path = folder / f"error.rank{first['rank']}.json"
        text = f"error: rank {first['rank']} failed first, in step {first['step']}: {first['error']} (see {path})"
        print(text, file=sys.stderr, flush=True)
    return EXIT_FAILURE


def _from_peer(error: BaseException) -> bool:
    """Whether the error is of a collective, which fails where a peer is gone."""
    return any(word in str(error).lower() for word in ("gloo", "nccl"))


def _earliest(folder: Path, started: float) -> dict[str, Any] | None:
    records = []
    for path in folder.glob("error.rank*.json"):
        try:
            entry = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError):
            continue
        if entry["time"] >= started:
            records.append(entry)
    return min(records, key=lambda entry: entry["time"], default=None)
