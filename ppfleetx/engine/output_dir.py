"""The folder of a run, at its start."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from ppfleetx.checkpoint.files import move_aside, write_text
from ppfleetx.checkpoint.manager import KEY as CKPT_DIR
from ppfleetx.checkpoint.manifest import missing
from ppfleetx.checkpoint.retention import step_of, steps_in
from ppfleetx.config import Problem, UserError
from ppfleetx.distributed import ParallelContext
from ppfleetx.distributed.store import poll
from ppfleetx.metrics.jsonl import FILE_NAME as METRICS

if TYPE_CHECKING:
    from ppfleetx.engine.engine import Engine

#: how long a rank looks for what rank 0 wrote: network disks remember for a while that a file is not there
VISIBLE_S = 60.0
#: how long the processes of a run that was killed may take to be gone, before another one is refused
ENDING_S = 10.0

KEY = "Engine.save_load.output_dir"

#: what runs write, besides checkpoints and profiles. STOP stays: it is for the run that is there next
_LEFT = (
    "config.yaml", METRICS, f"{METRICS}.old-[0-9]*", "visualdl", "visualdl.old-[0-9]*", "error.rank[0-9]*.json",
    "rank[0-9]*_time_*.paddle_trace.json",
)  # fmt: skip
#: what a process that was killed may leave; nobody else is writing when it is removed
_UNFINISHED = (
    ".step_[0-9]*.tmp", ".step_[0-9]*.deleted", f".shared-{'[0-9a-f]' * 32}", f"{METRICS}.tmp", f".{METRICS}.*.tmp",
    ".config.yaml.*.tmp", ".error.rank[0-9]*.json.*.tmp",
)  # fmt: skip

logger = logging.getLogger("ppfleetx")


@contextlib.contextmanager
def prepared_output_dir(engine: Engine) -> Iterator[None]:
    """Makes `output_dir` this run's, and no other's while inside; every rank must call it.

    Raises:
        UserError: it cannot be written, or another run writes there, or a rank does not see what rank 0 writes there; then it
            could not save checkpoints, and now is the time to say so.
    """
    with contextlib.ExitStack() as held:
        engine.context.rank0_first("settle output_dir", lambda: _take(engine, held))
        if engine.context.topology.world_size > 1:
            _check_shared(engine.context, engine.output_dir)
        yield


def _take(engine: Engine, held: contextlib.ExitStack) -> None:
    """Locks and settles it, on rank 0."""
    folder = engine.output_dir
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = held.enter_context(open(folder / ".lock", "a+"))  # noqa: SIM115
        if not poll(lambda: _locked(lock), ENDING_S):
            lock.seek(0)
            fix = f"give every run its own, or end that one; if its node is gone for good, delete {folder / '.lock'}"
            raise UserError(Problem(KEY, str(folder), f"another run writes there ({lock.read()})", fix))
        _settle(engine)
    except OSError as error:
        rule = f"the folder cannot be written: {error}"
        raise UserError(Problem(KEY, str(folder), rule)) from None


def _locked(lock: TextIO) -> bool:
    """Locks the file until it is closed, also by the end of the process; False if another process has locked it. Where the
    disk knows no locks, nothing keeps two runs apart."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    with contextlib.suppress(OSError):  # the disk is full: only the message to others will be poorer
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}")
        lock.flush()
    return True


def _check_shared(context: ParallelContext, folder: Path) -> None:
    name = context.rank0_first("write a file for all to see", lambda: _sign(folder))
    sign, rank = folder / name, context.topology.device_rank

    def look() -> None:
        if not poll(sign.exists, VISIBLE_S):
            rule = f"rank {rank} does not see what rank 0 writes there: it must be on a disk that all nodes share"
            raise UserError(Problem(KEY, str(folder), rule))

    try:
        context.together(look)
    finally:
        if context.is_main:
            sign.unlink(missing_ok=True)


def _sign(folder: Path) -> str:
    """Makes a file of a name that was never there; the name."""
    name = f".shared-{uuid.uuid4().hex}"
    (folder / name).touch()
    return name


def _settle(engine: Engine) -> None:
    """Makes `output_dir` this run's: what it does not continue is moved into `previous-N`, never written over.

    A fresh start (also one from the weights of a checkpoint) moves everything that an earlier run left; a resume keeps what it
    continues and moves the checkpoints of later steps, which `auto` would otherwise take for its own. Files that no run
    writes are nobody's to move. What goes on from `previous-N` gets its log as well.
    """
    folder, steps, step = engine.output_dir, engine.checkpoints.steps(), engine.progress.step
    if step and _is_in(folder, engine.resumed_from):
        stale = [path for path in steps if step_of(path) > step]
    else:
        stale = [*steps, *_left(folder, engine.config.Profiler.profiler_log)]
    for path in (path for pattern in _UNFINISHED for path in folder.glob(pattern)):
        _remove(path)
    if (moved := move_aside(stale, folder)) is not None:
        logger.warning("%s", _moved_text(folder, moved))
    metrics = folder / METRICS
    if metrics.exists():
        open(metrics, "ab").close()
    elif step and engine.resumed_from is not None:
        _fetch_log(engine.resumed_from.resolve().parent, folder)
    write_text(folder / "config.yaml", engine.config.to_yaml())


def _fetch_log(source: Path, folder: Path) -> None:
    """A copy of the log of a run that was moved aside and now goes on, if `source` is its `previous-N` and holds one."""
    if source.parent == folder.resolve() and source.name.startswith("previous-"):
        with contextlib.suppress(FileNotFoundError):  # checkpoints of later steps are moved without it
            write_text(folder / METRICS, (source / METRICS).read_text(encoding="utf-8", errors="replace"))


def _left(folder: Path, profiler_log: str) -> list[Path]:
    """What runs write into their folder, checkpoints apart."""
    traces = folder / profiler_log  # may be elsewhere, and may be the user's for other things as well
    inside = traces.parent == folder and traces.is_dir()
    own = [path.match("*.paddle_trace.json") for path in traces.iterdir()] if inside else []
    return [
        *([traces] if own and all(own) else []),
        *(path for pattern in _LEFT for path in sorted(folder.glob(pattern))),
    ]


def _remove(path: Path) -> None:
    """Removes what a process that was killed did not finish, if it can be removed. Links are no work of ours."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    elif path.is_file() and not path.is_symlink():
        with contextlib.suppress(OSError):
            path.unlink()


def _moved_text(folder: Path, moved: Path) -> str:
    """What happened to an earlier run, and how to go on with it: a user who forgot `ckpt_dir=auto` may have wanted that."""
    text = f"{folder} holds an earlier run; what this one does not continue was moved to {moved}"
    if (newest := newest_complete(moved)) is None:
        return text
    return (
        f"{text}. To go on with that run instead, stop this one and start again with -o {CKPT_DIR}={newest}; "
        f"from then on -o {CKPT_DIR}=auto goes on with the newest checkpoint in {folder}"
    )


def newest_complete(folder: Path) -> Path | None:
    """The newest complete checkpoint in a folder, by names and sizes."""
    return next((path for path in reversed(steps_in(folder)) if missing(path) is None), None)


def newest_moved(output_dir: Path) -> Path | None:
    """The newest complete checkpoint of the run that was last moved aside, of those that left one."""
    moved = sorted(output_dir.glob("previous-*"), key=lambda path: path.stat().st_mtime, reverse=True)
    return next(filter(None, map(newest_complete, moved)), None)


def _is_in(folder: Path, checkpoint: Path | None) -> bool:
    """Whether the checkpoint is in the folder, by whatever name: as it is, or as what a link points to."""
    if checkpoint is None:
        return False
    return folder.resolve() in (checkpoint.parent.resolve(), checkpoint.resolve().parent)
