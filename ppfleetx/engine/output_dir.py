"""The folder of a run, at its start."""

from __future__ import annotations

import logging
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from ppfleetx.checkpoint.files import move_aside, write_text
from ppfleetx.config import Problem, UserError
from ppfleetx.distributed import ParallelContext
from ppfleetx.distributed.store import poll

if TYPE_CHECKING:
    from ppfleetx.engine.engine import Engine

#: how long a rank looks for what rank 0 wrote: network disks remember for a while that a file is not there
VISIBLE_S = 60.0

logger = logging.getLogger("ppfleetx")


def prepare_output_dir(engine: Engine) -> None:
    """Makes `output_dir` this run's; every rank must call it.

    Raises:
        UserError: a rank does not see what rank 0 writes there; it could not save checkpoints, and now is the time to say so.
    """
    engine.context.rank0_first("settle output_dir", lambda: _settle(engine))
    if engine.context.topology.world_size > 1:
        _check_shared(engine.context, engine.output_dir)


def _check_shared(context: ParallelContext, folder: Path) -> None:
    name = context.rank0_first("write a file for all to see", lambda: _sign(folder))
    sign, rank = folder / name, context.topology.device_rank

    def look() -> None:
        if not poll(sign.exists, VISIBLE_S):
            rule = f"rank {rank} does not see what rank 0 writes there: it must be on a disk that all nodes share"
            raise UserError(Problem("Engine.save_load.output_dir", str(folder), rule))

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
    folder, resumed_from = engine.output_dir, engine.resumed_from
    folder.mkdir(parents=True, exist_ok=True)
    steps = engine.checkpoints.steps()
    if engine.progress.step and resumed_from is not None and resumed_from.resolve().parent == folder.resolve():
        stale = [step for step in steps if step.name > resumed_from.name]
    else:
        stale = [*steps, folder / "metrics.jsonl", folder / "visualdl", folder / "config.yaml"]
    if (moved := move_aside(stale, folder)) is not None:
        logger.warning("%s holds an earlier run; what this one does not continue was moved to %s", folder, moved)
    write_text(folder / "config.yaml", engine.config.to_yaml())
