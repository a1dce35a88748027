"""Checkpoints of given arrays, written without a model and without Paddle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ppfleetx.checkpoint.files import write_file
from ppfleetx.checkpoint.manifest import MANIFEST, Entry, Manifest
from ppfleetx.checkpoint.reader import Checkpoint
from ppfleetx.checkpoint.shards import write_shard

#: NumPy's type → the file's; bfloat16 is carried as uint16
DTYPES = {"float32": "F32", "float16": "F16", "float64": "F64", "uint16": "BF16"}


def write_checkpoint(
    folder: Path,
    tensors: dict[str, np.ndarray],
    parts: int = 1,
    dim: int = 0,
    run: dict[str, Any] | None = None,
    progress: dict[str, Any] | None = None,
) -> Checkpoint:
    """A checkpoint of `<name>` or `<name>:<slot>` to array, each cut along a dim (the last, if it has fewer) into files."""
    folder.mkdir(parents=True)
    files, entries = {}, []
    for part in range(parts):
        file, inside, memories = f"shard_{part:05d}.safetensors", [], []
        for key, values in tensors.items():
            name, _, slot = key.partition(":")
            along = min(dim, values.ndim - 1)
            edges = [values.shape[along] * number // parts for number in (part, part + 1)]
            box = tuple(tuple(edges) if d == along else (0, length) for d, length in enumerate(values.shape))
            if edges[0] < edges[1]:
                inside.append(Entry(name, slot, values.shape, DTYPES[str(values.dtype)], box, None, file))
                memories.append(np.ascontiguousarray(np.take(values, range(*edges), along)).reshape(-1))
        files[file] = write_shard(folder / file, {e.key: (e.dtype, e.stored_shape) for e in inside}, memories)
        entries += inside
    text = Manifest(files, entries, progress or {"step": 3}, {"config": {}, "layout": {}, **(run or {})}).to_text()
    write_file(folder / MANIFEST, [text.encode()])
    return Checkpoint(folder)


def random_arrays(*shapes: tuple[str, tuple[int, ...], str], seed: int = 0) -> dict[str, np.ndarray]:
    """Random values by (name, shape, NumPy type)."""
    random = np.random.default_rng(seed)
    return {name: random.normal(0, 3, shape).astype("float32").astype(dtype) for name, shape, dtype in shapes}


def bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 → bfloat16 bits, cut off (exact for values that fit)."""
    return (np.ascontiguousarray(values, "float32").view("uint32") >> 16).astype("uint16")
