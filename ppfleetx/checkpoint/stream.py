"""Tensors of a checkpoint in pieces, so that looking at one of any size takes little memory. Imports no Paddle."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np

from ppfleetx.checkpoint.manifest import Entry
from ppfleetx.checkpoint.reader import Checkpoint
from ppfleetx.checkpoint.regions import Region, whole
from ppfleetx.checkpoint.shards import DTYPES

#: memory of a piece
PIECE_BYTES = 16 * 2**20


def stored(saved: Checkpoint) -> dict[tuple[str, str], Entry]:
    """What a checkpoint holds, in its order: (name, slot) to one of the entries, of which dtype and shape are all alike."""
    found: dict[tuple[str, str], Entry] = {}
    for entry in saved.manifest.entries:
        found.setdefault((entry.name, entry.slot), entry)
    return found


def pieces(saved: Checkpoint, entry: Entry, piece_bytes: int | None = None) -> Iterator[np.ndarray]:
    """The tensor that an entry is part of, in row-major order: 1-D arrays of at most `piece_bytes` (or one element) each."""
    region = whole(entry.shape)
    step = max((piece_bytes or PIECE_BYTES) // DTYPES[entry.dtype].itemsize, 1)
    if region.size <= step:
        yield saved.read(entry.name, entry.slot, region)
        return
    for start in range(0, prod(entry.shape), step):
        run = (start, min(start + step, region.size))
        yield saved.read(entry.name, entry.slot, Region(region.box, run))


def numbers(memory: np.ndarray, dtype: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Stored values as float64; bfloat16 is the upper half of a float32."""
    if dtype == "BF16":
        memory = (memory.astype(np.uint32) << 16).view(np.float32)
    return memory.astype(np.float64)
