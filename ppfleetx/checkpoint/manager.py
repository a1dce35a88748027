"""Checkpoints of one run: a folder a step, complete or not there at all.

`output_dir/step_0000000N/` holds `weights.safetensors` and `optimizer.safetensors` (logical names, written by rank 0),
`rank_R.json` (random streams of rank R) and, written last, `manifest.json` with the size of every file. The folder is made
under another name and renamed when it is complete. Nothing in it can execute code when loaded.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import paddle
from safetensors import SafetensorError
from safetensors.paddle import load_file, save_file

from ppfleetx.checkpoint.files import sync, write_json
from ppfleetx.config.errors import Problem, UserError
from ppfleetx.distributed import ParallelContext

KEY = "Engine.save_load.ckpt_dir"
FORMAT = "ppfleetx-1"
_STEP = re.compile(r"^step_(\d+)$")


@dataclass
class TrainingState:
    """All that a run needs to go on.

    Attributes:
        weights: parameters by logical name.
        optimizer: moments and master weights, `<logical name>.<slot>`.
        streams: the random streams of this rank (JSON values); None if the checkpoint has none for this rank and layout.
        progress: step, consumed samples, scaler and the like (JSON values).
        run: what wrote it: resolved config, layout, versions (JSON values).
    """

    weights: dict[str, paddle.Tensor]
    optimizer: dict[str, paddle.Tensor]
    streams: dict[str, Any] | None
    progress: dict[str, Any]
    run: dict[str, Any] = field(default_factory=dict)


class CheckpointManager:
    """Saves, finds and loads the checkpoints under `output_dir`; every rank holds one and makes the same calls."""

    def __init__(self, output_dir: Path, context: ParallelContext):
        self.output_dir = output_dir
        self.context = context

    def save(self, step: int, state: TrainingState) -> Path:
        """Writes the checkpoint of `step`; every rank must call it, and all return when it is complete.

        Raises:
            OSError: the disk is full, say; earlier checkpoints stand.
        """
        final = self.output_dir / f"step_{step:08d}"
        aside = self.output_dir / f".step_{step:08d}.tmp"
        self.context.rank0_first("make the checkpoint folder", lambda: _make_empty(aside))
        write_json(aside / f"rank_{self.context.topology.device_rank:05d}.json", state.streams)
        self.context.agree(None)  # every rank has written
        self.context.rank0_first("write the checkpoint", lambda: _write_shared(aside, final, state))
        return final

    def find(self, ckpt_dir: str | None) -> Path | None:
        """The folder to resume from: `ckpt_dir`, or for "auto" the newest complete one; None: start afresh.

        Rank 0 looks and tells the others; every rank must call it.

        Raises:
            UserError: a path was given and there is no complete checkpoint in it.
        """
        found = self.context.rank0_first("find the checkpoint", lambda: self._find(ckpt_dir))
        return None if found is None else Path(found)

    def _find(self, ckpt_dir: str | None) -> str | None:
        if ckpt_dir is None:
            return None
        if ckpt_dir == "auto":
            complete = [path for path in self.steps() if missing(path) is None]
            return str(complete[-1]) if complete else None
        path = Path(ckpt_dir)
        if (why := missing(path)) is not None:
            inside = [step.name for step in _steps(path)] if path.is_dir() else []
            fix = f"it holds {', '.join(inside)}: name one of them" if inside else "give a step_N folder, or auto"
            raise UserError(Problem(KEY, ckpt_dir, f"{why} (looked in {path.absolute()})", fix))
        return str(path)

    def steps(self) -> list[Path]:
        """The step folders under `output_dir`, oldest first, complete or not."""
        return _steps(self.output_dir)

    def load(self, path: Path) -> TrainingState:
        """Reads the complete checkpoint at `path`; no communication.

        Raises:
            UserError: a file is damaged.
        """
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        rank = path / f"rank_{self.context.topology.device_rank:05d}.json"
        same = manifest["run"]["layout"] == layout(self.context)
        try:
            return TrainingState(
                weights=load_file(str(path / "weights.safetensors")),
                optimizer=load_file(str(path / "optimizer.safetensors")),
                streams=json.loads(rank.read_text(encoding="utf-8")) if same else None,
                progress=manifest["progress"],
                run=manifest["run"],
            )
        except (SafetensorError, json.JSONDecodeError, OSError) as error:
            raise UserError(Problem(KEY, str(path), f"the checkpoint is damaged: {error}")) from None


def layout(context: ParallelContext) -> dict[str, int]:
    """Degrees of the axes: streams are restored only where they are the same."""
    return dict(context.topology.degrees)


def missing(path: Path) -> str | None:
    """Why there is no complete checkpoint at `path`; None if there is one."""
    if not path.is_dir():
        return "there is no such folder"
    if not (path / "manifest.json").is_file():
        return "there is no complete checkpoint here: manifest.json is missing"
    try:
        sizes = json.loads((path / "manifest.json").read_text(encoding="utf-8"))["files"]
    except (json.JSONDecodeError, KeyError, OSError) as error:
        return f"manifest.json cannot be read: {error}"
    for name, size in sizes.items():
        if not (path / name).is_file():
            return f"{name} is missing"
        if (found := (path / name).stat().st_size) != size:
            return f"{name} has {found} bytes instead of {size}"
    return None


def _steps(folder: Path) -> list[Path]:
    found = [path for path in folder.iterdir() if _STEP.match(path.name)] if folder.is_dir() else []
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _write_shared(aside: Path, final: Path, state: TrainingState) -> None:
    """Rank 0's part: tensors, manifest, and the rename that makes the checkpoint exist."""
    save_file(state.weights, str(aside / "weights.safetensors"))
    save_file(state.optimizer, str(aside / "optimizer.safetensors"))
    files = sorted(path for path in aside.iterdir())
    for path in files:
        path.chmod(0o666 & ~_umask())  # safetensors makes its files private
        sync(path)
    sizes = {path.name: path.stat().st_size for path in files}
    manifest = {"format": FORMAT, "files": sizes, "progress": state.progress, "run": state.run}
    write_json(aside / "manifest.json", manifest)
    shutil.rmtree(
        final, ignore_errors=True
    )  # an incomplete one of the same step; a complete one was moved aside at start
    os.replace(aside, final)
    sync(final.parent)


def _umask() -> int:
    """The process's file mode mask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
