"""Proves that a layout changes nothing: runs it beside one process and compares losses, norms and every gradient.

Two runs a layout, both without dropout: one update of AdamW without clipping, whose first moments are the gradients (times
1 − beta1) by logical name; then the configuration as it is, for some updates.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from ppfleetx.checkpoint.reader import Checkpoint
from ppfleetx.config.layouts import Layout
from ppfleetx.engine.failures import RunError

#: largest relative differences in float32 (relative to max(1, |value of one process|); gradients to their own norm)
FIRST_LOSS, GRADIENT, NORM = 1e-6, 1e-5, 1e-5
#: the same after several updates, by optimizer: Adam divides by the root of small numbers
LATER = {"SGD": 1e-5, "Momentum": 1e-5}
LATER_ADAM = 1e-4

_QUIET = (
    "Model.hidden_dropout_prob=0", "Model.attention_probs_dropout_prob=0", "Engine.eval_freq=0", "Engine.visualdl=false",
    "Engine.logging_freq=1", "Engine.save_load.save_steps=-1", "Engine.save_load.ckpt_dir=null",
    "Global.cpu_threads=1",  # however many processes share the cores: threads change the last bits
)  # fmt: skip
_GRADIENT = ("Optimizer.name=AdamW", "Optimizer.grad_clip=null", "Engine.max_steps=1")
_SECONDS_A_RUN = 1800


@dataclass(frozen=True)
class Verdict:
    """How a layout compares with one process.

    Attributes:
        layout: its string.
        loss: largest relative difference of a loss.
        norm: largest relative difference of a gradient norm.
        gradient: largest relative difference of a parameter's first gradient.
        first_step: first update whose loss parts beyond the tolerance; None: none does.
        first_parameter: first parameter, in name order, whose first gradient does; None: none does.
        passed: whether all is within the tolerances.
    """

    layout: str
    loss: float
    norm: float
    gradient: float
    first_step: int | None
    first_parameter: str | None
    passed: bool


@dataclass(frozen=True)
class Runner:
    """Starts runs of `train` (the script tools/train.py).

    Attributes:
        train: its path.
        config: `-c` and `-o` arguments of the user.
        folder: where runs write.
    """

    train: Path
    config: tuple[str, ...]
    folder: Path

    def run(self, layout: Layout, name: str, overrides: Sequence[str]) -> Path:
        """One run of a layout; gives its output folder.

        Raises:
            RunError: it failed.
        """
        output = self.folder / layout.name / name
        command = [sys.executable]
        if layout.world_size > 1:
            logs = str(output / "log")
            command += [
                "-m",
                "paddle.distributed.launch",
                "--nproc_per_node",
                str(layout.world_size),
                "--log_dir",
                logs,
            ]
        pairs = [*_QUIET, *layout.overrides, *overrides, f"Engine.save_load.output_dir={output}"]
        command += [str(self.train), *self.config, "-o", *pairs]
        output.mkdir(parents=True, exist_ok=True)
        with open(output / "console.txt", "w", encoding="utf-8") as console:
            code = subprocess.run(command, stdout=console, stderr=console, timeout=_SECONDS_A_RUN).returncode
        if code != 0:
            raise RunError(f"layout {layout.name} ended with exit code {code}: see {output / 'console.txt'}")
        return output

    def both(self, layout: Layout, steps: int) -> tuple[Path, Path]:
        """The two runs of a layout."""
        return self.run(layout, "gradient", _GRADIENT), self.run(layout, "steps", (f"Engine.max_steps={steps}",))


def compare(name: str, reference: tuple[Path, Path], found: tuple[Path, Path], tolerance: float) -> Verdict:
    """Compares the two runs of a layout with those of one process."""
    right, own = (_records(folders[1]) for folders in (reference, found))
    losses = _relative(own, right, "loss")
    norms = _relative(own, right, "grad_norm")
    allowed = [FIRST_LOSS] + [tolerance] * (len(losses) - 1)
    steps = [step for step, (difference, most) in enumerate(zip(losses, allowed, strict=True), 1) if difference > most]
    gradients = _gradients(reference[0], found[0])
    parted = [parameter for parameter, difference in gradients.items() if difference > GRADIENT]
    passed = not steps and not parted and norms[0] <= NORM and max(norms) <= max(NORM, 10 * tolerance)
    worst = max(gradients.values())
    return Verdict(name, max(losses), max(norms), worst, next(iter(steps), None), next(iter(parted), None), passed)


def table(verdicts: Sequence[Verdict]) -> str:
    """For people."""
    head = ("layout", "loss", "grad norm", "gradients", "first step", "first parameter", "verdict")
    rows = [
        (
            one.layout, f"{one.loss:.1e}", f"{one.norm:.1e}", f"{one.gradient:.1e}", str(one.first_step or "-"),
            one.first_parameter or "-", "same" if one.passed else "PARTS",
        )
        for one in verdicts
    ]  # fmt: skip
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)
    ]
    return "\n".join(lines)


def write_json(verdicts: Sequence[Verdict], path: Path) -> None:
    """For programs: a list of verdicts."""
    path.write_text(json.dumps([asdict(verdict) for verdict in verdicts], indent=1) + "\n", encoding="utf-8")


def _records(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def _relative(found: Sequence[dict[str, float]], right: Sequence[dict[str, float]], key: str) -> list[float]:
    return [abs(a[key] - b[key]) / max(1.0, abs(b[key])) for a, b in zip(found, right, strict=True)]


def _gradients(reference: Path, found: Path) -> dict[str, float]:
    """‖Δg‖/‖g‖ of every parameter. What has no gradient but for rounding (a key's bias moves all scores of a row alike) is
    measured against a thousandth of the largest norm."""
    right, own = Checkpoint(reference / "step_00000001"), Checkpoint(found / "step_00000001")
    values = {name: right.read_whole(name, "moment1") for name in right.shapes()}
    floor = 1e-3 * max(float(np.linalg.norm(value)) for value in values.values())
    differences = {}
    for name, value in values.items():
        distance = float(np.linalg.norm(own.read_whole(name, "moment1") - value))
        differences[name] = distance / max(float(np.linalg.norm(value)), floor)
    return differences
