"""The checkpoints of one run: a folder a step, complete or not there at all.

`output_dir/step_0000000N/` holds `shard_R.safetensors` (what rank R alone owns, by logical names), `rank_R.json` (its random
streams) and, written last, `manifest.json`. The folder is made under another name and renamed when all of it is on the disk.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ppfleetx.checkpoint.files import sync
from ppfleetx.checkpoint.manifest import Damaged, missing, read_manifest, verify
from ppfleetx.checkpoint.writer import TrainingState, write_manifest, write_own
from ppfleetx.config.errors import Problem, UserError

if TYPE_CHECKING:
    from ppfleetx.distributed import ParallelContext

T = TypeVar("T")

KEY = "Engine.save_load.ckpt_dir"
_OUTPUT_KEY = "Engine.save_load.output_dir"
_STEP = re.compile(r"^step_(\d+)$")

logger = logging.getLogger("ppfleetx")


class SaveError(Exception):
    """A checkpoint could not be written (the disk is full, say). All ranks raise it alike; earlier checkpoints stand."""


class CheckpointManager:
    """Saves and finds the checkpoints under `output_dir`; every rank holds one and makes the same calls."""

    def __init__(self, output_dir: Path, context: ParallelContext):
        self.output_dir = output_dir
        self.context = context

    def save(self, step: int, state: TrainingState) -> Path:
        """Writes the checkpoint of `step`; every rank must call it, and all return when it is complete.

        Raises:
            SaveError: on all ranks, if one cannot write.
        """
        topology = self.context.topology
        final, aside = self.output_dir / f"step_{step:08d}", self.output_dir / f".step_{step:08d}.tmp"
        rank0_first, together = self.context.rank0_first, self.context.together
        try:
            rank0_first("make the checkpoint's folder", self._reported(lambda: _make_empty(aside)))
            together(self._reported(lambda: write_own(aside, topology.device_rank, state)))
            rank0_first(
                "complete the checkpoint", self._reported(lambda: _complete(aside, final, topology.world_size, state))
            )
        except UserError as error:
            if self.context.is_main:
                shutil.rmtree(aside, ignore_errors=True)
            raise SaveError("; ".join(problem.rule for problem in error.problems)) from error
        return final

    def find(self, ckpt_dir: str | None) -> Path | None:
        """The checkpoint to resume from: `ckpt_dir`, or for "auto" the newest whole one; None: start afresh.

        Every rank must call it. Rank 0 looks, and all read a share of the files to compare checksums.

        Raises:
            UserError: a path was given and there is no whole checkpoint in it.
        """
        damaged: set[str] = set()
        while True:
            found = self.context.rank0_first("find the checkpoint", lambda: self._find(ckpt_dir, damaged))
            if found is None:
                return None
            try:
                self.context.together(partial(self._check_own_share, Path(found)))
                return Path(found)
            except UserError as error:
                if ckpt_dir != "auto":
                    raise
                logger.warning("passed over %s: %s", found, error.problems[0].rule)
                damaged.add(found)

    def steps(self) -> list[Path]:
        """The step folders under `output_dir`, oldest first, complete or not."""
        return _steps(self.output_dir)

    def _find(self, ckpt_dir: str | None, damaged: set[str]) -> str | None:
        if ckpt_dir is None:
            return None
        if ckpt_dir == "auto":
            return self._newest(damaged)
        path = Path(ckpt_dir)
        if (why := missing(path)) is not None:
            inside = [step.name for step in _steps(path)] if path.is_dir() else []
            fix = f"it holds {', '.join(inside)}: name one of them" if inside else "give a step_N folder, or auto"
            raise UserError(Problem(KEY, ckpt_dir, f"{why} (looked in {path.absolute()})", fix))
        return str(path)

    def _newest(self, damaged: set[str]) -> str | None:
        for path in reversed(self.steps()):
            if str(path) in damaged:
                continue
            if (why := missing(path)) is None:
                return str(path)
            logger.warning("passed over %s: %s", path, why)
        return None

    def _check_own_share(self, path: Path) -> None:
        """Compares checksums of every so many files, so that all ranks together read each file once."""
        topology = self.context.topology
        try:
            names = sorted(read_manifest(path).files)
        except Damaged as error:
            raise UserError(Problem(KEY, str(path), str(error))) from None
        faults = verify(path, names[topology.device_rank :: topology.world_size])
        if faults:
            raise UserError(*(Problem(KEY, str(path), f"the checkpoint is damaged: {fault}") for fault in faults))

    def _reported(self, work: Callable[[], T]) -> Callable[[], T]:
        """`work`, such that a failure to write travels to the other ranks."""

        def reported() -> T:
            try:
                return work()
            except OSError as error:
                rule = f"rank {self.context.topology.device_rank} cannot write a checkpoint: {error}"
                raise UserError(Problem(_OUTPUT_KEY, str(self.output_dir), rule)) from error

        return reported


def _steps(folder: Path) -> list[Path]:
    found = [path for path in folder.iterdir() if _STEP.match(path.name)] if folder.is_dir() else []
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


def _make_empty(folder: Path) -> None:
    """A new folder; what a save left that was killed goes, as does its like of other steps."""
    for left in folder.parent.glob(".step_*.tmp"):
        shutil.rmtree(left)
    folder.mkdir(parents=True)


def _complete(aside: Path, final: Path, num_ranks: int, state: TrainingState) -> None:
    """Rank 0's part: manifest, and the rename that makes the checkpoint exist."""
    write_manifest(aside, num_ranks, state)
    sync(aside)
    if final.exists():  # not complete: a complete one of this step was moved aside at the start
        shutil.rmtree(final)
    os.replace(aside, final)
    sync(final.parent)
