"""Files that are never half-written: write aside, sync, rename."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def sync(path: Path) -> None:
    """Forces a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Replaces the file at `path` by `text`: a reader sees the old or the new one, whole."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    aside.write_text(text, encoding="utf-8")
    sync(aside)
    os.replace(aside, path)
    sync(path.parent)


def write_json(path: Path, value: Any) -> None:
    """`write_text` of a JSON value."""
    write_text(path, json.dumps(value, indent=1))


def move_aside(paths: list[Path], root: Path) -> Path | None:
    """Moves what an earlier run left into a new folder `root/previous-N`; None if there is nothing to move."""
    paths = [path for path in paths if path.exists()]
    if not paths:
        return None
    number = 1
    while (folder := root / f"previous-{number}").exists():
        number += 1
    folder.mkdir(parents=True)
    for path in paths:
        os.replace(path, folder / path.name)
    return folder
