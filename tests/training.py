"""Runs `tools/train.py` for tests: in this process, or as real processes through the launcher."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import paddle

from ppfleetx.checkpoint.reader import Checkpoint
from ppfleetx.checkpoint.snapshot import Snapshots, TrainingState
from ppfleetx.checkpoint.writer import write_manifest, write_own
from ppfleetx.distributed.trainable import Piece
from ppfleetx.layers.spec import ParameterSpec
from tests.launch import LaunchResult, launch
from tools.train import main

REPO = Path(__file__).resolve().parents[1]
TINY = "configs/debug/tiny_gpt.yaml"
NO_DROPOUT = ("Model.hidden_dropout_prob=0", "Model.attention_probs_dropout_prob=0")


class Outcome(NamedTuple):
    """What a run left.

    Attributes:
        code: exit code (of the launcher, for several processes).
        output: its output_dir.
        launched: the launch, for several processes.
    """

    code: int
    output: Path
    launched: LaunchResult | None = None

    def records(self, kind: str = "train") -> list[dict[str, Any]]:
        """The records of metrics.jsonl."""
        lines = (self.output / "metrics.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if record["kind"] == kind]

    def losses(self) -> list[float]:
        """The training losses, in order."""
        return [record["loss"] for record in self.records()]

    def checkpoint(self, step: int) -> Checkpoint:
        """A checkpoint, whoever wrote it."""
        return Checkpoint(self.output / f"step_{step:08d}")

    def weights(self, step: int) -> dict[str, np.ndarray]:
        """The weights of a checkpoint by logical name: whole, without padding."""
        names = self.checkpoint(step).shapes()
        return {key: value for key, value in self.tensors(step).items() if key in names}

    def tensors(self, step: int) -> dict[str, np.ndarray]:
        """Weights, moments and master weights of a checkpoint: `<logical name>` and `<logical name>.<slot>`."""
        saved = self.checkpoint(step)
        slots = {entry.key: (entry.name, entry.slot) for entry in saved.manifest.entries}
        return {key: saved.read_whole(*slot).copy() for key, slot in slots.items()}  # `rewrite` may follow


def arguments(output: Path, *overrides: str, config: str = TINY) -> list[str]:
    """Command line of a quiet run of the tiny model: no VisualDL, no evaluation, one checkpoint at the end. One thread: the
    last bits are the same on any number of cores, beside any number of processes."""
    quiet = ["Engine.visualdl=false", "Engine.eval_freq=0", "Engine.save_load.save_steps=-1", "Global.cpu_threads=1"]
    schedule = "Optimizer.lr.decay_steps=30"  # not that of max_steps: half a run and a whole one train alike
    paths = [*_data(), f"Engine.save_load.output_dir={output}"]
    return ["-c", str(REPO / config), "-o", *quiet, schedule, *paths, *overrides]


def train(output: Path, *overrides: str, config: str = TINY) -> Outcome:
    """One process: this one."""
    return Outcome(main(arguments(output, *overrides, config=config)), output)


def train_on(nproc: int, output: Path, *overrides: str, timeout: float = 120.0) -> Outcome:
    """`nproc` real processes through the launcher."""
    result = launch([REPO / "tools/train.py", *arguments(output, *overrides)], nproc, timeout=timeout, cwd=REPO)
    return Outcome(result.returncode, output, result)


def rewrite(saved: Checkpoint, weights: dict[str, np.ndarray]) -> None:
    """Gives a checkpoint of one process other weights, and takes its optimizer's states away."""
    pieces = []
    for name, value in weights.items():
        tensor = paddle.to_tensor(value)
        tensor.spec = ParameterSpec(name=name, shape=value.shape)
        pieces.append(Piece(name, tensor, tensor.spec.box(), None, True))
    state = TrainingState(pieces, {}, saved.streams(0), saved.manifest.progress, saved.manifest.run)
    snapshot = Snapshots().take(state)
    write_own(saved.path, 0, snapshot)
    write_manifest(saved.path, 1, snapshot)


def same_weights(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    """Whether two sets of weights are equal to the bit."""
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def _data() -> list[str]:
    return [f"Data.{mode}.dataset.input_dir={REPO / 'configs/debug/data'}" for mode in ("Train", "Eval")]


def train_many_on(
    nproc: int,
    runs: dict[str, tuple[str, ...]],
    folder: Path,
    timeout: float = 240.0,
    worker: str = "tests/parity/worker.py",
) -> dict[str, Outcome]:
    """Several runs in one set of real processes, each with its overrides and a folder of its name."""
    lines = [arguments(folder / name, *overrides) for name, overrides in runs.items()]
    result = launch([REPO / worker, json.dumps(lines)], nproc, timeout=timeout, cwd=REPO)
    return {name: Outcome(result.returncode, folder / name, result) for name in runs}
