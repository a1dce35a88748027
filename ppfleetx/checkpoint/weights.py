"""Checkpoints of one plain safetensors file and its manifest, most of them of weights alone. Imports no Paddle.

A run reads such a folder like any other checkpoint; other programs read its `model.safetensors`. Where weights are all there
is, the manifest tells of no progress, and a run needs `Engine.save_load.weights_only`.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
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


@contextmanager
def new_place(path: Path) -> Iterator[Path]:
    """Where to make what becomes `path` if all goes well and vanishes if not.

    Raises:
        UserError: there is something at `path` already.
    """
    if path.exists() or path.is_symlink():
        rule = "it is there already, and nothing is overwritten"
        raise UserError(Problem("OUT", str(path), rule, "give another name"))
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")  # in containers all have the same process id
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield aside
        sync(aside)
        os.rename(aside, path)
        sync(path.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        aside.unlink(missing_ok=True)
        raise


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to write into; see `new_place`."""
    with new_place(path) as aside:
        aside.mkdir()
        yield aside


def write_weights_manifest(
    folder: Path, files: Mapping[str, FileSum], entries: Sequence[Entry], run: dict[str, Any], source: str
) -> None:
    """Makes files of weights in `folder` a checkpoint.

    Args:
        run: `config` and `versions`, as a run would write them.
        source: where the weights are from, for people.
    """
    assert (gap := uncovered(entries)) is None, gap
    run = {**{name: run.get(name, {}) for name in ("config", "versions")}, "layout": {}, "source": source}
    text = Manifest(dict(files), list(entries), {}, run).to_text()
    write_file(folder / MANIFEST, [text.encode()])


def whole_entry(name: str, dtype: str, shape: tuple[int, ...], file: str = WEIGHTS) -> Entry:
    """A weight that lies whole in one file."""
    return Entry(name, "", shape, dtype, whole(shape).box, None, file)


def gather_shards(folder: Path) -> None:
    """Makes the shards in the folder of a checkpoint, which nobody reads yet, one file of whole tensors; in pieces."""
    saved = Checkpoint(folder)
    manifest, tensors = saved.manifest, stored(saved).values()
    entries = [replace(entry, box=whole(entry.shape).box, flat=None, file=WEIGHTS) for entry in tensors]
    summed = write_shard(
        folder / WEIGHTS,
        {entry.key: (entry.dtype, entry.shape) for entry in entries},
        (piece for entry in tensors for piece in pieces(saved, entry)),
    )
    shards = {entry.file for entry in manifest.entries}
    files = {name: one for name, one in manifest.files.items() if name not in shards} | {WEIGHTS: summed}
    write_file(folder / MANIFEST, [replace(manifest, files=files, entries=entries).to_text().encode()])
    for shard in shards:
        (folder / shard).unlink()


def consolidate(saved: Checkpoint, out: Path) -> int:
    """Writes the weights into the new folder `out`, or if it ends in `.safetensors` into that file alone; returns their number.

    Names, dtypes and values are those that one process would save: no padding; query, key and value apart. The config goes
    along; progress, optimizer states and random streams do not. A run reads the folder only. In pieces.

    Raises:
        UserError: there is something at `out`.
        Damaged: a file of the checkpoint is not what its manifest says.
    """
    weights = [entry for (_, slot), entry in stored(saved).items() if not slot]
    entries = [whole_entry(entry.name, entry.dtype, entry.shape) for entry in weights]
    step = saved.manifest.progress.get("step")
    source = f"step {step} of {saved.path.absolute()}" if step is not None else str(saved.path.absolute())

    def write(path: Path) -> FileSum:
        tensors = {entry.key: (entry.dtype, entry.shape) for entry in entries}
        memories = (piece for entry in weights for piece in pieces(saved, entry))
        return write_shard(path, tensors, memories, {"format": "ppfleetx", "source": source})

    if out.suffix == ".safetensors":
        with new_place(out) as aside:
            write(aside)
        return len(entries)
    with new_folder(out) as folder:
        write_weights_manifest(folder, {WEIGHTS: write(folder / WEIGHTS)}, entries, saved.manifest.run, source)
    return len(entries)
