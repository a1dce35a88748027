"""What saving and loading cost beside the plain writing and reading of the same bytes, and a resume late in a run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import paddle

from ppfleetx.checkpoint.files import sync, write_text
from ppfleetx.checkpoint.manager import CheckpointManager
from ppfleetx.checkpoint.manifest import MANIFEST, read_manifest
from ppfleetx.checkpoint.reader import Checkpoint
from ppfleetx.checkpoint.snapshot import TrainingState, memory_of
from ppfleetx.distributed import ParallelContext, Topology
from ppfleetx.distributed.trainable import Piece
from ppfleetx.engine.resume import read_optimizer, read_weights
from ppfleetx.layers.spec import ParameterSpec

_ROOT = Path(__file__).resolve().parents[2]
_TINY = _ROOT / "configs/debug/tiny_gpt.yaml"
_PIECE_BYTES = 16 * 2**20
_MATRICES, _WIDTH = 24, 1024
_SLOTS = ("moment1", "moment2")
#: seconds in which a virtual machine has given free memory back to its host (Linux reports it some time after it became free)
SETTLE_S = 3.0
#: where the resumed run stands
LATE_STEP = 20_000


def measure_checkpoint(folder: Path, rounds: int, megabytes: int) -> dict[str, Any]:
    """Saves and loads a state of about `megabytes` MB, `rounds` times, each beside plain files; the result as JSON values.

    Plain: the same bytes in pieces of 16 MiB, with one fsync, and read cold. Ours: host copy, files with checksums, manifest,
    rename; and read cold, checksums compared. Both read weights into the model's memory and moments into new memory; the one
    that goes first in a round goes second in the next.

    Args:
        folder: empty; on the disk that is measured.
    """
    state = _state(megabytes * 10**6)
    sides: list[_Plain | _Ours] = [_Plain(folder / "plain", state), _Ours(folder / "run", state)]
    tensors = _tensors(state)
    room = [np.empty_like(memory_of(tensor)) for tensor in tensors]
    figures: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        _settle(tensors)
        seconds = {"copy": _copy(tensors, room)}
        for side in sides:
            for work in (side.save, side.load):
                _settle(tensors)
                seconds |= work()
            side.delete()
        sides.reverse()
        if number == 0:  # what is done the first time does not count, but for the stop that makes room for copies
            seconds = {"first_block": seconds["block"]}
        for name, value in seconds.items():
            figures.setdefault(name, []).append(value)
    num_bytes = sum(memory_of(tensor).nbytes for tensor in tensors)
    return {"bytes": num_bytes, "seconds": figures, "late_resume_s": _late_resume(folder / "late")}


def checkpoint_lines(result: dict[str, Any]) -> list[str]:
    """The result for a reader."""
    seconds = {name: median(values) for name, values in result["seconds"].items()}
    rate = {name: result["bytes"] / 10**6 / value for name, value in seconds.items()}
    rows = [
        f"{what}: {', '.join(f'{value:.3f}' for value in result['seconds'][name])} s, median {rate[name]:.0f} MB/s"
        for name, what in (
            ("plain_save", "plain write"),
            ("save", "save"),
            ("plain_load", "plain read"),
            ("load", "load"),
        )
    ]
    return [
        f"{result['bytes'] / 10**6:.0f} MB",
        *rows,
        f"copy in memory {seconds['copy']:.3f} s; a save stops training for {seconds['block']:.3f} s "
        f"(the first one, into new memory, {seconds['first_block']:.3f} s)",
        f"save = {rate['save'] / rate['plain_save']:.2f} of plain (budget at least 0.8); "
        f"load = {rate['load'] / rate['plain_load']:.2f} (0.8); stop = {seconds['block'] / seconds['copy']:.2f} of a copy "
        f"(at most 1.5); first update after a resume at step {LATE_STEP}: {result['late_resume_s']:.1f} s (10 s)",
    ]


def _state(num_bytes: int) -> TrainingState:
    """Matrices with two moments each; float32."""
    rows = num_bytes // (4 * _MATRICES * _WIDTH * (1 + len(_SLOTS)))
    pieces: list[Piece] = []
    optimizer: dict[str, paddle.Tensor] = {}
    for number in range(_MATRICES):
        name = f"blocks.{number}.weight"
        weight = paddle.randn([rows, _WIDTH])
        weight.spec = ParameterSpec(name=name, shape=(rows, _WIDTH))
        weight.stop_gradient = False  # of a frozen one no moments are read
        pieces.append(Piece(name, weight, weight.spec.box(), None, True))
        optimizer |= {f"{name}.{slot}": paddle.randn([rows, _WIDTH]) for slot in _SLOTS}
    return TrainingState(pieces, optimizer, {}, {"step": 1})


def _tensors(state: TrainingState) -> list[paddle.Tensor]:
    return [*(piece.tensor for piece in state.pieces), *state.optimizer.values()]


def _settle(tensors: list[paddle.Tensor]) -> None:
    """Lets all that is measured begin alike: nothing waits for the disk, and there is free memory for the system's cache. (A
    virtual machine gives free memory back after a while, and needs five times a write's time to get it again.)"""
    os.sync()
    time.sleep(SETTLE_S)
    np.empty(3 * sum(memory_of(tensor).nbytes for tensor in tensors), np.uint8).fill(1)


def _copy(tensors: list[paddle.Tensor], room: list[np.ndarray]) -> float:
    """Seconds of one copy in memory; from the second call on into memory that is there."""
    began = time.perf_counter()
    for tensor, target in zip(tensors, room, strict=True):
        np.copyto(target, memory_of(tensor))
    return time.perf_counter() - began


class _Plain:
    """The same bytes in one file, without anything else."""

    def __init__(self, path: Path, state: TrainingState):
        self._path, self._state = path, state

    def save(self) -> dict[str, float]:
        began = time.perf_counter()
        with open(self._path, "wb", buffering=0) as file:
            for tensor in _tensors(self._state):
                for view in _views(tensor):
                    file.write(view)
            os.fsync(file.fileno())
        return {"plain_save": time.perf_counter() - began}

    def load(self) -> dict[str, float]:
        _make_cold([self._path])
        began, moments = time.perf_counter(), []
        with open(self._path, "rb", buffering=0) as file:
            for piece in self._state.pieces:
                for view in _views(piece.tensor):
                    file.readinto(view)
            for value in self._state.optimizer.values():
                moments.append(paddle.empty(value.shape))
                for view in _views(moments[-1]):
                    file.readinto(view)
        return {"plain_load": time.perf_counter() - began}

    def delete(self) -> None:
        self._path.unlink()


def _views(tensor: paddle.Tensor) -> list[memoryview]:
    """A tensor's memory in pieces."""
    memory = memoryview(memory_of(tensor)).cast("B")  # type: ignore[arg-type]
    return [memory[start : start + _PIECE_BYTES] for start in range(0, len(memory), _PIECE_BYTES)]


class _Ours:
    """A checkpoint, as a run on one process makes and reads it."""

    def __init__(self, folder: Path, state: TrainingState):
        self._state, self._step = state, 0
        self._manager = CheckpointManager(folder, ParallelContext(Topology(0, 1), "cpu", {}, None))

    def save(self) -> dict[str, float]:
        self._step += 1
        began = time.perf_counter()
        self._manager.save(self._step, self._state)
        block = time.perf_counter() - began
        self._manager.wait()
        assert not self._manager.failed
        return {"block": block, "save": time.perf_counter() - began}

    def load(self) -> dict[str, float]:
        (path,), pieces = self._manager.steps(), self._state.pieces
        _make_cold(list(path.iterdir()))
        sums = [float(piece.tensor.detach().sum()) for piece in pieces]
        for piece in pieces:
            piece.tensor.detach().zero_()
        restored: dict[str, paddle.Tensor] = {}

        def read(folder: Path) -> Callable[[], None]:
            saved = Checkpoint(folder)
            restored.update(read_optimizer(pieces, saved, frozenset(_SLOTS)))
            return lambda: read_weights(pieces, saved)

        began = time.perf_counter()
        assert self._manager.restore(str(path), read) == path
        seconds = time.perf_counter() - began
        assert sums == [float(piece.tensor.detach().sum()) for piece in pieces]
        assert all(bool((restored[name] == value).all()) for name, value in self._state.optimizer.items())
        return {"load": seconds}

    def delete(self) -> None:
        shutil.rmtree(self._manager.steps()[0])


def _make_cold(paths: list[Path]) -> None:
    """Takes files out of the system's cache, after they are on the disk."""
    for path in paths:
        sync(path)
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _late_resume(folder: Path) -> float:
    """Seconds from the start of `tools/train.py` to its first log line, where it resumes at `LATE_STEP`."""
    keys = ["Engine.visualdl=false", "Engine.eval_freq=0", f"Engine.save_load.output_dir={folder}"]
    command = [sys.executable, str(_ROOT / "tools/train.py"), "-c", str(_TINY), "-o", *keys]
    subprocess.run([*command, "Engine.max_steps=1"], cwd=_ROOT, check=True, capture_output=True)
    path = (folder / "step_00000001").rename(folder / f"step_{LATE_STEP:08d}")
    manifest = read_manifest(path)
    samples = manifest.progress["consumed_samples"] * LATE_STEP
    late = replace(manifest, progress={**manifest.progress, "step": LATE_STEP, "consumed_samples": samples})
    write_text(path / MANIFEST, late.to_text())
    resume = [*command, "Engine.save_load.ckpt_dir=auto", f"Engine.max_steps={LATE_STEP + 1}"]
    began = time.perf_counter()
    with subprocess.Popen(resume, cwd=_ROOT, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        line = next(line for line in run.stdout if "[train]" in line)
        seconds = time.perf_counter() - began
        assert f"batch: {LATE_STEP}," in line, line
        run.stdout.read()
    return seconds
