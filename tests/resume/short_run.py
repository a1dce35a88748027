"""A run of a tiny model that tests of resumes go on from."""

from __future__ import annotations

from pathlib import Path

SMALL = ("Model.num_layers=1", "Model.hidden_size=32", "Engine.save_load.save_steps=1")
AUTO = "Engine.save_load.ckpt_dir=auto"


def from_path(path: Path | str) -> str:
    """The override that names a checkpoint."""
    return f"Engine.save_load.ckpt_dir={path}"
