"""Files that are never half-written: write aside, sync, rename. And checksums (crc32c) of what is written and read."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from crc32c import crc32c

#: bytes that are summed and written, or read and summed, in one go
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


class Summing:
    """The checksum of bytes that are given piece by piece, and are written or copied meanwhile: a thread sums up long ones."""

    def __init__(self) -> None:
        self.size = 0
        self._crc = 0
        self._thread: ThreadPoolExecutor | None = None
        self._pending: deque[Future[None]] = deque()

    def add(self, chunk: memoryview) -> None:
        """The next bytes; they must not change before `wait` (of this chunk's turn) or `result`."""
        self.size += len(chunk)
        if self._thread is None and len(chunk) < CHUNK_BYTES:
            return self._sum(chunk)
        self._thread = self._thread or ThreadPoolExecutor(1, "ppfleetx-checksum")
        self._pending.append(self._thread.submit(self._sum, chunk))
        return None

    def wait(self, left: int) -> None:
        """Until at most `left` of the chunks given are not summed up yet."""
        while len(self._pending) > left:
            self._pending.popleft().result()

    def result(self) -> FileSum:
        """Of all that was given; nothing may be added afterwards."""
        self.wait(0)
        if self._thread is not None:
            self._thread.shutdown()
        return FileSum(self.size, f"{self._crc:08x}")

    def _sum(self, chunk: memoryview) -> None:
        self._crc = crc32c(chunk, self._crc)


def write_file(path: Path, buffers: Iterable[bytes | np.ndarray]) -> FileSum:
    """Writes the buffers one after another into the file and forces it to the disk.

    Args:
        path: not readable as a whole before this returns, so: a name that nobody reads yet.
        buffers: not empty ones; arrays are contiguous.
    """
    summing = Summing()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        for buffer in buffers:
            view = memoryview(buffer).cast("B")  # type: ignore[arg-type]  # NumPy's stubs do not say that arrays are buffers
            for start in range(0, len(view), CHUNK_BYTES):
                chunk = view[start : start + CHUNK_BYTES]
                begin = summing.size
                summing.add(chunk)
                while chunk:
                    chunk = chunk[os.write(descriptor, chunk) :]
                _start_writeback(descriptor, begin, summing.size - begin)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
        summed = summing.result()
    return summed


def _start_writeback(descriptor: int, start: int, size: int) -> None:
    """Has Linux begin to write a part of a file to the disk, so that the disk works while the next part is copied to the cache:
    advice that dirty pages are not needed does that. Elsewhere, or where it cannot be done, the sync at the end does it all."""
    if size >= CHUNK_BYTES and hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, start, size, os.POSIX_FADV_DONTNEED)


def sum_file(path: Path) -> FileSum:
    """Reads a file in full and sums it up."""
    summing = Summing()
    buffers = [memoryview(bytearray(CHUNK_BYTES)) for _ in range(3)]  # two are summed up while one is read into
    with open(path, "rb", buffering=0) as file:
        for buffer in itertools.cycle(buffers):
            summing.wait(2)
            if not (count := file.readinto(buffer)):
                return summing.result()
            summing.add(buffer[:count])
    raise AssertionError("unreachable")


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
