"""Shard files in the safetensors format (an 8-byte length, a JSON header, the tensors end to end), read by memory mapping.

Our own few lines in place of the safetensors package, because its NumPy side knows no bfloat16 (0.8) and we sum what we write
in the same pass. bfloat16 values are carried bit by bit as uint16.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ppfleetx.checkpoint.files import FileSum, write_file

#: name in the file → what NumPy reads it as
DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
}
#: Paddle's name → name in the file
NAMES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32"}


class Damaged(Exception):
    """A checkpoint is not what its manifest says; the message names the file."""


def write_shard(
    path: Path,
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    memories: Iterable[np.ndarray],
    metadata: Mapping[str, str] | None = None,
) -> FileSum:
    """Writes tensors and forces them to the disk.

    Args:
        path: the file.
        tensors: key to (dtype, shape).
        memories: the values of each, in the same order, in one piece or several, none of them empty; taken one at a time.
        metadata: texts that the file carries besides.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for key, (dtype, shape) in tensors.items():
        stop = offset + prod(shape) * DTYPES[dtype].itemsize
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data begin at a multiple of 8
    return write_file(path, itertools.chain([len(text).to_bytes(8, "little"), text], memories))


class Shard:
    """A shard file, mapped: only what is touched is read.

    Raises:
        Damaged: it is not a safetensors file.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            self._bytes = np.memmap(path, np.uint8, "r")
            if self._bytes[:8].tobytes() == b"version ":  # https://git-lfs.github.com/spec/v1
                raise Damaged(f"{path} is a pointer of Git LFS, not the file: run `git lfs pull` there")
            length = int.from_bytes(self._bytes[:8].tobytes(), "little")
            self._header = json.loads(self._bytes[8 : 8 + length].tobytes())
            self._data = self._bytes[8 + length :]
        except (OSError, RecursionError, ValueError) as error:
            raise Damaged(f"{path} cannot be read: {error}") from None

    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """What it holds, in its order: key to (dtype as the file says it, shape)."""
        try:
            entries = {key: value for key, value in self._header.items() if key != "__metadata__"}
            return {key: (value["dtype"], tuple(map(int, value["shape"]))) for key, value in entries.items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise Damaged(f"{self.path} has no header of safetensors: {type(error).__name__} {error}") from None

    def memory(self, key: str) -> np.ndarray:
        """The values of a tensor, 1-D, read-only."""
        try:
            entry = self._header[key]
            start, stop = entry["data_offsets"]
            memory = self._data[start:stop].view(DTYPES[entry["dtype"]])
            assert memory.size == prod(entry["shape"])
        except (AssertionError, KeyError, TypeError, ValueError) as error:
            raise Damaged(f"{self.path} does not hold {key} as it should: {type(error).__name__} {error}") from None
        return memory
