"""The checkpoints of one run: a folder a step, complete or not there at all.

`output_dir/step_0000000N/` holds `shard_R.safetensors` (what rank R alone owns, by logical names), `rank_R.json` (its random
streams) and, written last, `manifest.json`. The folder is made under another name and renamed when all of it is on the disk.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ppfleetx.checkpoint.files import sync
from ppfleetx.checkpoint.manifest import MANIFEST, Damaged, missing, read_manifest, verify
from ppfleetx.checkpoint.retention import Retention, delete, steps_in
from ppfleetx.checkpoint.snapshot import Snapshot, Snapshots, TrainingState
from ppfleetx.checkpoint.weights import gather_shards
from ppfleetx.checkpoint.writer import write_manifest, write_own
from ppfleetx.config.errors import Problem, UserError

if TYPE_CHECKING:
    from ppfleetx.distributed import ParallelContext

T = TypeVar("T")

KEY = "Engine.save_load.ckpt_dir"
_OUTPUT_KEY = "Engine.save_load.output_dir"
_OTHERWISE = "give a step_N folder, or auto; tools/checkpoint.py converts what other programs wrote"

logger = logging.getLogger("ppfleetx")


class CheckpointManager:
    """Saves and finds the checkpoints under `output_dir`; every rank holds one and makes the same calls.

    A save goes on in a thread while training does: only the copy to host memory stops it. A save that fails (the disk is full,
    say) is logged and counted, alike on all ranks; earlier checkpoints stand.

    Args:
        output_dir: where the step folders are.
        context: this rank's place and its meetings.
        retention: which checkpoints stay; the default keeps all.
        consolidate: one file of whole tensors a checkpoint, which rank 0 makes of those of all ranks.

    Attributes:
        failed: the steps whose save failed, as far as is known.
    """

    def __init__(
        self,
        output_dir: Path,
        context: ParallelContext,
        retention: Retention | None = None,
        consolidate: bool = False,
    ):
        self.output_dir, self.context = output_dir, context
        self.failed: list[int] = []
        self._retention, self._consolidate = retention or Retention(), consolidate
        self._snapshots = Snapshots()
        self._beside: ParallelContext | None = None
        self._saving: threading.Thread | None = None

    def save(self, step: int, state: TrainingState) -> None:
        """Starts to save the checkpoint of `step`; returns when the state may change again. Every rank must call it.

        An earlier save that is still under way is waited for.
        """
        self.wait()
        began, snapshot = time.perf_counter(), self._take(state)
        blocked_s = time.perf_counter() - began
        if self._beside is None:
            self._beside = self.context.beside("save")
        arguments = (self._beside, step, snapshot, blocked_s)
        # a daemon: a process that must end does not wait for a peer that is gone
        self._saving = threading.Thread(target=self._save, args=arguments, name=f"save step {step}", daemon=True)
        self._saving.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until the save under way is over, or the time is up; says whether none is left."""
        if self._saving is not None:
            self._saving.join(timeout_s)
            if self._saving.is_alive():
                return False
            self._saving = None
        return True

    def restore(self, ckpt_dir: str | None, read: Callable[[Path], Callable[[], None]]) -> Path | None:
        """Restores from `ckpt_dir`, or for "auto" from the newest whole checkpoint; None: there is none, start afresh.

        Every rank must call it. Rank 0 looks; all read a share of the files to compare checksums, and meanwhile `read`.

        Args:
            ckpt_dir: a step folder, "auto", or None: nothing is to be restored.
            read: reads the checkpoint at a path without changing the run; what it returns then changes it.

        Raises:
            UserError: a path was given and there is no whole checkpoint in it, or `read` raised it.
        """
        damaged: set[str] = set()
        while True:
            found = self.context.rank0_first("find the checkpoint", lambda: self._find(ckpt_dir, damaged))
            if found is None:
                return None
            path, refused, put = Path(found), None, None
            with ThreadPoolExecutor(1) as thread:
                damage = thread.submit(self._damage, path)
                try:
                    put = read(path)
                except UserError as error:
                    refused = error
            try:
                self.context.agree(damage.result())
            except UserError as error:
                if ckpt_dir != "auto":
                    raise
                logger.warning("passed over %s: %s", found, error.problems[0].rule)
                damaged.add(found)
                continue
            self.context.agree(refused)
            assert put is not None
            put()
            return path

    def steps(self) -> list[Path]:
        """The step folders under `output_dir`, oldest first, complete or not; none where it cannot be read."""
        return steps_in(self.output_dir)

    def _take(self, state: TrainingState) -> Snapshot | Exception:
        """The snapshot; or why there is none, which must not end the run on this rank alone."""
        try:
            return self._snapshots.take(state)
        except (MemoryError, RuntimeError) as error:  # Paddle says the latter where memory is short
            return error

    def _find(self, ckpt_dir: str | None, damaged: set[str]) -> str | None:
        if ckpt_dir is None:
            return None
        if ckpt_dir == "auto":
            return self._newest(damaged)
        path = Path(os.path.expanduser(ckpt_dir))
        if (why := missing(path)) is not None:
            inside = [step.name for step in steps_in(path)]
            fix = f"it holds {', '.join(inside)}: name one of them" if inside else _OTHERWISE
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

    def _damage(self, path: Path) -> UserError | None:
        """Compares checksums of every so many files, so that all ranks together read each file once."""
        topology = self.context.topology
        try:
            names = sorted(read_manifest(path).files)
        except Damaged as error:
            return UserError(Problem(KEY, str(path), str(error)))
        faults = verify(path, names[topology.device_rank :: topology.world_size])
        if not faults:
            return None
        return UserError(*(Problem(KEY, str(path), f"the checkpoint is damaged: {fault}") for fault in faults))

    def _save(self, context: ParallelContext, step: int, snapshot: Snapshot | Exception, blocked_s: float) -> None:
        """The thread of a save; `context` is its own."""
        began = time.perf_counter()
        try:
            path = write_checkpoint(context, self.output_dir, step, snapshot, self._consolidate)
        except (UserError, RuntimeError) as error:  # the latter: another rank is gone
            self.failed.append(step)
            reasons = "; ".join(each.rule for each in error.problems) if isinstance(error, UserError) else str(error)
            logger.error("step %d was NOT saved: %s; earlier checkpoints stand", step, reasons)
            return
        seconds = time.perf_counter() - began
        logger.info("saved %s (in %.2f s, of which training stood still for %.2f s)", path, seconds, blocked_s)
        if context.is_main:
            self._delete_old()

    def _delete_old(self) -> None:
        """Deletes what need not be kept, now that a newer checkpoint is complete."""
        whole = [path for path in self.steps() if (path / MANIFEST).is_file()]
        for path in self._retention.superfluous(whole):
            try:
                delete(path)
            except OSError as error:
                logger.warning("%s is no longer needed but cannot be deleted: %s", path, error)


def write_checkpoint(
    context: ParallelContext, output_dir: Path, step: int, snapshot: Snapshot | Exception, consolidate: bool = False
) -> Path:
    """Writes the checkpoint of `step`; every rank must call it, and all return when it is complete. Its folder.

    Args:
        context: this rank's place, with meetings of its own.
        output_dir: where the step folders are.
        step: updates done.
        snapshot: what this rank writes; or why it cannot.
        consolidate: see `CheckpointManager`.

    Raises:
        UserError: on all ranks, if one of them cannot write; nothing is left.
    """
    final, aside = output_dir / f"step_{step:08d}", output_dir / f".step_{step:08d}.tmp"
    rank, num_ranks = context.topology.device_rank, context.topology.world_size

    def write() -> None:
        if isinstance(snapshot, Exception):
            raise snapshot
        write_own(aside, rank, snapshot)

    def complete() -> None:
        assert isinstance(snapshot, Snapshot)
        write_manifest(aside, num_ranks, snapshot)
        if consolidate:
            gather_shards(aside)
        _rename(aside, final)

    def told(work: Callable[[], T]) -> Callable[[], T]:
        """`work`, such that a failure, of whatever kind, travels to the other ranks: they must not wait."""

        def telling() -> T:
            try:
                return work()
            except Exception as error:
                kind = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
                rule = f"rank {rank} cannot write a checkpoint: {kind}{error}"
                raise UserError(Problem(_OUTPUT_KEY, str(output_dir), rule)) from error

        return telling

    try:
        context.rank0_first("make the checkpoint's folder", told(lambda: _make_empty(aside)))
        context.together(told(write))
        context.rank0_first("complete the checkpoint", told(complete))
    except UserError:
        if context.is_main:
            shutil.rmtree(aside, ignore_errors=True)
        raise
    return final


def _make_empty(folder: Path) -> None:
    """A new folder; what a save left that was killed goes, as does its like of other steps, if it can be removed."""
    for left in (*folder.parent.glob(".step_*.tmp"), *folder.parent.glob(".step_*.deleted")):
        shutil.rmtree(left, ignore_errors=left != folder)  # a network disk keeps files that someone has open
    folder.mkdir(parents=True)


def _rename(aside: Path, final: Path) -> None:
    """Makes the checkpoint exist."""
    sync(aside)
    if final.exists():  # not complete: a complete one of this step was moved aside at the start
        shutil.rmtree(final)
    os.replace(aside, final)
    sync(final.parent)
