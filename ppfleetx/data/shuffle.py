"""Documents in random order, in bounded memory: an external merge sort by random keys.

Document i (from 0, as it comes) gets the i-th 64-bit number of the Philox stream whose key is the seed, and documents come out
sorted by (number, i). So the order depends on the seed and the number of documents alone, not on memory, batches or
processes; nor on NumPy's version, which fixes the streams of its bit generators, though not its `permutation`. Every order
is equally likely, as far as the numbers differ: two of a billion documents share one with a probability of 3 %, and then
stay as they came.

Documents collect in memory; whenever they fill it they are sorted and written end to end, a *run*, to one nameless file. In
the end the range of the numbers is cut into parts whose documents fit into memory; each part is a slice of every run.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, cast

import numpy as np

from ppfleetx.config.errors import Problem, UserError

#: bytes of ids that are held in memory at most, one document's excepted
MEMORY_BYTES = 256 << 20
#: seeds lie below it: other programs read the sidecar's numbers as signed 64 bits
SEED_END = 1 << 63

_LAST_KEY = (1 << 64) - 1
_BATCH_TOKENS = 1 << 20
_WRITE_BYTES = 1 << 20


class _Run(NamedTuple):
    """Sorted documents in the file: keys uint64 [documents], ascending; ends int64 [documents + 1], offsets in tokens."""

    keys: np.ndarray
    ends: np.ndarray


class DocumentShuffler:
    """Takes documents in and gives them out in random order. A context manager: its file is gone with it, or with the process.

    Memory: `memory_bytes`, and 24 bytes a document. Disk: as much again as the ids of all documents take, unless they fit
    into memory.

    Args:
        seed: of the order, in [0, SEED_END).
        dtype: of the ids, while they are here.
        folder: where the file is.
        memory_bytes: of ids in memory.
        told: (option, value) to name in errors.

    Raises:
        UserError: the seed is out of range; here or later: the file cannot be written.
    """

    def __init__(
        self,
        seed: int,
        dtype: np.dtype,
        folder: Path,
        memory_bytes: int | None = None,
        told: tuple[str, str] = ("", ""),
    ):
        check_seed(seed)
        self._draw = np.random.Philox(key=seed).random_raw
        self._capacity = max((memory_bytes or MEMORY_BYTES) // dtype.itemsize, 1)
        self._ids = np.empty(self._capacity, dtype)  # takes memory as it is filled
        self._filled = 0
        self._lengths: list[np.ndarray] = []  # of the documents in `_ids`
        self._runs: list[_Run] = []
        self._folder, self._told = folder, told
        self._file: io.BufferedRandom | None = None

    def append_batch(self, ids: np.ndarray, lengths: np.ndarray) -> None:
        """Documents laid end to end: `ids` integers [sum of lengths], `lengths` int32 [documents]."""
        if self._filled + ids.size > self._capacity:
            self._write_run()
            if ids.size > self._ids.size:
                self._ids = np.empty(ids.size, self._ids.dtype)
        self._ids[self._filled : self._filled + ids.size] = ids
        self._filled += ids.size
        self._lengths.append(lengths)

    def drain(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """All documents in their order, as batches (ids [tokens], lengths int32 [documents]) of about a million tokens."""
        if self._file is None:
            keys, ends = self._take_documents()
            yield from _in_order(self._ids, keys, ends)
            return
        self._write_run()
        self._ids = np.empty(0, self._ids.dtype)
        for slices in self._parts(0, _LAST_KEY):
            yield from _in_order(*self._gather(slices))

    def _take_documents(self) -> tuple[np.ndarray, np.ndarray]:
        """(keys [documents], ends [documents + 1]) of what is in memory, which is then free for others."""
        lengths = np.concatenate([np.empty(0, np.int32), *self._lengths])
        self._lengths, self._filled = [], 0
        return self._draw(lengths.size), _ends(lengths)

    def _write_run(self) -> None:
        keys, ends = self._take_documents()
        if not keys.size:
            return
        with self._writing():
            if self._file is None:
                # without a name: it goes with the process, however that ends
                nameless = tempfile.TemporaryFile("w+b", _WRITE_BYTES, dir=self._folder)  # noqa: SIM115 - see close
                self._file = cast(io.BufferedRandom, nameless)
            for ids, _ in _in_order(self._ids, keys, ends):
                self._file.write(ids.data)
        first = self._runs[-1].ends[-1] if self._runs else 0
        order = np.argsort(keys, kind="stable")
        self._runs.append(_Run(keys[order], first + _ends(np.diff(ends)[order])))

    def _parts(self, low: int, last: int) -> Iterator[list[slice]]:
        """Cuts the keys [low, last] into ranges whose documents fit into memory: for each, its slice of every run."""
        slices = [slice(*_between(run.keys, low, last)) for run in self._runs]
        tokens = sum(
            int(run.ends[each.stop] - run.ends[each.start]) for run, each in zip(self._runs, slices, strict=True)
        )
        documents = sum(each.stop - each.start for each in slices)
        if tokens <= self._capacity or documents == 1 or low == last:
            if documents:
                yield slices
            return
        middle = (low + last) // 2
        yield from self._parts(low, middle)
        yield from self._parts(middle + 1, last)

    def _gather(self, slices: list[slice]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(ids, keys, ends) of the documents in a slice of every run, those of earlier runs first."""
        assert self._file is not None
        keys = np.concatenate([run.keys[each] for run, each in zip(self._runs, slices, strict=True)])
        bounds = [run.ends[each.start : each.stop + 1] for run, each in zip(self._runs, slices, strict=True)]
        ends = _ends(np.concatenate([np.diff(each) for each in bounds]))
        ids, filled = np.empty(ends[-1], self._ids.dtype), 0
        with self._writing():
            self._file.flush()
            for each in bounds:
                size = int(each[-1] - each[0])
                self._file.seek(int(each[0]) * ids.itemsize)
                if self._file.readinto(ids[filled : filled + size].data) != size * ids.itemsize:
                    raise OSError("it became shorter")
                filled += size
        return ids, keys, ends

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            rule = f"--shuffle needs a temporary file in {self._folder}, as large as the corpus's ids: {error}"
            raise UserError(
                Problem(*self._told, rule, "make room for the corpus twice, or name another folder")
            ) from None

    def close(self) -> None:
        """The file is gone."""
        if self._file is not None:
            with suppress(OSError):  # what it still holds does not fit on the disk
                self._file.close()
            self._file = None

    def __enter__(self) -> DocumentShuffler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_seed(seed: int) -> None:
    """Raises UserError unless `seed` is one."""
    if not 0 <= seed < SEED_END:
        raise UserError(
            Problem("--shuffle", seed, f"a seed is a whole number from 0 to {SEED_END - 1}", "--shuffle 1024")
        )


def _ends(lengths: np.ndarray) -> np.ndarray:
    """Cumulative offsets int64 [documents + 1] of documents of these lengths."""
    ends = np.zeros(lengths.size + 1, np.int64)
    np.cumsum(lengths, dtype=np.int64, out=ends[1:])
    return ends


def _between(keys: np.ndarray, low: int, last: int) -> tuple[int, int]:
    """Where the sorted `keys` lie in [low, last]: [first, end)."""
    return int(np.searchsorted(keys, np.uint64(low))), int(np.searchsorted(keys, np.uint64(last), side="right"))


def _in_order(ids: np.ndarray, keys: np.ndarray, ends: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Documents of `ids`, cut at `ends`, sorted by their keys (equal ones as they lie), in batches."""
    order = np.argsort(keys, kind="stable")
    starts, stops = ends[:-1][order], ends[1:][order]
    lengths = (stops - starts).astype(np.int32)
    # a batch ends with the document that brings it over the limit
    cuts = np.flatnonzero(np.diff(np.cumsum(lengths, dtype=np.int64) // _BATCH_TOKENS, prepend=0)) + 1
    for part in np.split(np.arange(order.size), cuts):
        if part.size:
            pieces = [ids[a:b] for a, b in zip(starts[part].tolist(), stops[part].tolist(), strict=True)]
            yield np.concatenate(pieces), lengths[part]
