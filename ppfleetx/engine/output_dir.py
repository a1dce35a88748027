"""The folder of a run, at its start."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from ppfleetx.checkpoint.files import move_aside, write_text
from ppfleetx.checkpoint.retention import step_of
from ppfleetx.config import Problem, UserError
from ppfleetx.distributed import ParallelContext
from ppfleetx.distributed.store import poll

if TYPE_CHECKING:
    from ppfleetx.engine.engine import Engine

#: how long a rank looks for what rank 0 wrote: network disks remember for a while that a file is not there
VISIBLE_S = 60.0
#: how long the processes of a run that was killed may take to be gone, before another one is refused
ENDING_S = 10.0

KEY = "Engine.save_load.output_dir"

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
    continues and moves the checkpoints of later steps, which `auto` would otherwise take for its own.
    """
    folder, steps = engine.output_dir, engine.checkpoints.steps()
    if engine.progress.step and _is_in(folder, engine.resumed_from):
        stale = [step for step in steps if step_of(step) > engine.progress.step]
    else:
        stale = [*steps, folder / "metrics.jsonl", folder / "visualdl", folder / "config.yaml"]
    if (moved := move_aside(stale, folder)) is not None:
        logger.warning("%s holds an earlier run; what this one does not continue was moved to %s", folder, moved)
    if (metrics := folder / "metrics.jsonl").exists():
        open(metrics, "ab").close()
    write_text(folder / "config.yaml", engine.config.to_yaml())


def _is_in(folder: Path, checkpoint: Path | None) -> bool:
    """Whether the checkpoint is in the folder, by whatever name: as it is, or as what a link points to."""
    if checkpoint is None:
        return False
    return folder.resolve() in (checkpoint.parent.resolve(), checkpoint.resolve().parent)
