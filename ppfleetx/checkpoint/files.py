"""Files that are never half-written: write aside, sync, rename. And checksums (crc32c) of what is written and read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from crc32c import crc32c

#: bytes that are summed and written, or read and summed, in one go: they stay in the processor's cache meanwhile
CHUNK_BYTES = 4 * 2**20


class FileSum(NamedTuple):
    """Size in bytes and checksum (crc32c, 8 hexadecimal digits) of a file."""

    size: int
    crc32c: str


def sync(path: Path) -> None:
    """Forces a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, buffers: Iterable[bytes | np.ndarray]) -> FileSum:
    """Writes the buffers one after another into the file and forces it to the disk.

    Args:
        path: not readable as a whole before this returns, so: a name that nobody reads yet.
        buffers: not empty ones; arrays are contiguous.
    """
    size = crc = 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        for buffer in buffers:
            view = memoryview(buffer).cast("B")  # type: ignore[arg-type]  # NumPy's stubs do not say that arrays are buffers
            for start in range(0, len(view), CHUNK_BYTES):
                chunk = view[start : start + CHUNK_BYTES]
                crc, size = crc32c(chunk, crc), size + len(chunk)
                while chunk:
                    chunk = chunk[os.write(descriptor, chunk) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return FileSum(size, f"{crc:08x}")


def sum_file(path: Path) -> FileSum:
    """Reads a file in full and sums it up."""
    size = crc = 0
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc, size = crc32c(buffer[:count], crc), size + count
    return FileSum(size, f"{crc:08x}")


def write_text(path: Path, text: str) -> None:
    """Replaces the file at `path` by `text`: a reader sees the old or the new one, whole."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    write_file(aside, [text.encode()] if text else [])
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
