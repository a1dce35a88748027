"""Checkpoints that hold weights alone: one plain safetensors file and its manifest. Imports no Paddle.

A run reads such a folder like any other checkpoint (`Engine.save_load.weights_only`); other programs read its
`model.safetensors`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ppfleetx.checkpoint.files import FileSum, sync, write_file
from ppfleetx.checkpoint.manifest import MANIFEST, Entry, Manifest, uncovered
from ppfleetx.checkpoint.reader import Checkpoint
from ppfleetx.checkpoint.regions import whole
from ppfleetx.checkpoint.shards import write_shard
from ppfleetx.checkpoint.stream import pieces, stored
from ppfleetx.config.errors import Problem, UserError

WEIGHTS = "model.safetensors"
#: key in `Manifest.run` of a checkpoint without optimizer states and random streams
WEIGHTS_ONLY = "weights_only"


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `path` if all goes well and vanishes if not.

    Raises:
        UserError: there is something at `path` already.
    """
    if path.exists() or path.is_symlink():
        raise UserError(
            Problem("OUT", str(path), "it is there already, and nothing is overwritten", "name a new folder")
        )
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    aside.mkdir(parents=True)
    try:
        yield aside
        sync(aside)
        os.rename(aside, path)
        sync(path.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def write_weights_manifest(
    folder: Path, files: Mapping[str, FileSum], entries: Sequence[Entry], progress: dict[str, Any], run: dict[str, Any]
) -> None:
    """Makes files of weights in `folder` a checkpoint; `run` must hold `config`."""
    assert (gap := uncovered(entries)) is None, gap
    run = {**run, "layout": {}, WEIGHTS_ONLY: True}  # random streams are of no layout
    text = Manifest(dict(files), list(entries), progress, run).to_text()
    write_file(folder / MANIFEST, [text.encode()])


def whole_entry(name: str, dtype: str, shape: tuple[int, ...], file: str = WEIGHTS) -> Entry:
    """A weight that lies whole in one file."""
    return Entry(name, "", shape, dtype, whole(shape).box, None, file)


def consolidate(saved: Checkpoint, out: Path) -> int:
    """Writes the weights into the new folder `out`, in pieces; returns their number.

    Names, dtypes and values are those that one process would save: no padding; query, key and value apart. Step and config
    go along; optimizer states and random streams do not.

    Raises:
        UserError: there is something at `out`.
        Damaged: a file of the checkpoint is not what its manifest says.
    """
    weights = [entry for (_, slot), entry in stored(saved).items() if not slot]
    entries = [whole_entry(entry.name, entry.dtype, entry.shape) for entry in weights]
    with new_folder(out) as folder:
        summed = write_shard(
            folder / WEIGHTS,
            {entry.key: (entry.dtype, entry.shape) for entry in entries},
            (piece for entry in weights for piece in pieces(saved, entry)),
            {"format": "ppfleetx", "step": str(saved.manifest.progress.get("step"))},
        )
        manifest = saved.manifest
        write_weights_manifest(folder, {WEIGHTS: summed}, entries, manifest.progress, manifest.run)
    return len(entries)
