"""Writing a token corpus document by document: aside first, then renamed, the index last.

Only lengths are kept in memory (4 bytes a document). A reader needs both files of the pair, and the index appears last,
so a killed run leaves nothing that opens.
"""

from __future__ import annotations

import array
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np

from ppfleetx.config.errors import Problem, UserError
from ppfleetx.data.token_files import (
    FLEETX,
    FORMATS,
    MEGATRON,
    MEGATRON_DTYPES,
    MEGATRON_HEADER,
    MEGATRON_MAGIC,
    MEGATRON_VERSION,
    META_SUFFIX,
    CorpusMeta,
    FileFormat,
    token_dtype,
)

_NPY_HEADER_BYTES = 128


class CorpusWriter:
    """Writes one corpus. A context manager: leaving it publishes the corpus, leaving it by an exception removes all.

    Args:
        prefix: path without suffixes; its folder is made if missing.
        file_format: "megatron" or "fleetx".
        vocab_size: ids must lie in [0, vocab_size); also sets the stored dtype.
        overwrite: replace a corpus that is there already.
        key: option to name in errors.

    Raises:
        UserError: the prefix ends in no name, or is taken (in either format) and `overwrite` is False; here, from `append`
            or from `finish`: its files cannot be written (the disk is full).
    """

    def __init__(
        self,
        prefix: str | Path,
        file_format: str,
        vocab_size: int,
        *,
        overwrite: bool = False,
        key: str = "--output-prefix",
    ):
        self.prefix = Path(prefix)
        self.format = FORMATS[file_format]
        self.vocab_size = vocab_size
        self.dtype = token_dtype(vocab_size)
        self.num_tokens = 0
        self.max_id = -1
        self._lengths = array.array("i")
        self._told = (key, str(prefix))
        if self.prefix.name in ("", "..") or str(prefix).endswith(os.sep):
            rule = "it must end in a name, to which the endings of the files are added"
            raise UserError(Problem(key, str(prefix), rule, os.path.join(str(prefix), "corpus")))
        self._overwrite = overwrite
        self._check_free()
        with self._writing():
            self.prefix.parent.mkdir(parents=True, exist_ok=True)
            self._data: IO[bytes] = open(_aside(self.format.data_path(self.prefix)), "wb")  # noqa: SIM115 - see abort
        if self.format is FLEETX:
            self._data.write(_npy_header(self.dtype, 0))  # same size as the real one, which is written at the end

    @property
    def num_documents(self) -> int:
        return len(self._lengths)

    def append(self, ids: Sequence[int] | np.ndarray) -> None:
        """Append one document: integers [length]."""
        self.append_batch(np.asarray(ids, np.int64), np.array([len(ids)], np.int32))

    def append_batch(self, ids: np.ndarray, lengths: np.ndarray) -> None:
        """Append documents laid end to end: `ids` integers [sum of lengths], `lengths` int32 [documents].

        Raises:
            ValueError: an id outside [0, vocab_size), or lengths that do not add up.
        """
        if int(lengths.sum(dtype=np.int64)) != ids.size:
            raise ValueError(f"lengths add up to {lengths.sum()}, but there are {ids.size} ids")
        if ids.size:
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= self.vocab_size:
                raise ValueError(f"ids {low}..{high} do not lie in [0, {self.vocab_size})")
            self.max_id = max(self.max_id, high)
        with self._writing():
            self._data.write(ids.astype(self.dtype).tobytes())
        self._lengths.frombytes(lengths.astype(np.int32).tobytes())
        self.num_tokens += ids.size

    def finish(
        self,
        eos_id: int | None = None,
        tokenizer: str = "",
        tokenizer_sha256: str = "",
        *,
        bos_id: int | None = None,
        shuffle_seed: int | None = None,
    ) -> CorpusMeta:
        """Publish the corpus and its sidecar, durably; returns the sidecar. Arguments are fields of it.

        Raises:
            ValueError: there is no token.
        """
        if not self.num_tokens:
            raise ValueError("a corpus needs at least one token")
        meta = CorpusMeta(
            format=self.format.name,
            vocab_size=self.vocab_size,
            eos_id=eos_id,
            num_documents=self.num_documents,
            num_tokens=self.num_tokens,
            max_id=self.max_id,
            tokenizer=tokenizer,
            tokenizer_sha256=tokenizer_sha256,
            bos_id=bos_id,
            shuffle_seed=shuffle_seed,
        )
        with self._writing():
            self._publish(meta)
        return meta

    def _check_free(self) -> None:
        taken = [path for path in _all_paths(self.prefix) if path.exists()]
        if taken and not self._overwrite:
            key, prefix = self._told
            rule = f"an existing corpus is kept; found {', '.join(map(str, taken))}"
            raise UserError(Problem(key, prefix, rule, "choose another prefix or add --overwrite"))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            key, prefix = self._told
            raise UserError(Problem(key, prefix, f"its files cannot be written: {error}")) from None

    def _publish(self, meta: CorpusMeta) -> None:
        self._check_free()  # another run may have been quicker
        data_path, index_path = self.format.data_path(self.prefix), self.format.index_path(self.prefix)
        meta_path = Path(f"{self.prefix}{META_SUFFIX}")
        if self.format is FLEETX:
            self._data.seek(0)
            self._data.write(_npy_header(self.dtype, self.num_tokens))
        _sync_and_close(self._data)
        with open(_aside(index_path), "wb") as index:
            self._write_index(index)
            _sync_and_close(index)
        with open(_aside(meta_path), "wb") as sidecar:
            sidecar.write(json.dumps(asdict(meta), indent=2).encode() + b"\n")
            _sync_and_close(sidecar)
        # the old index goes first and the new one comes last: in between there is no pair to read
        for path in _all_paths(self.prefix):
            path.unlink(missing_ok=True)
        for path in (data_path, meta_path, index_path):
            os.replace(_aside(path), path)
        _sync_folder(self.prefix.parent)

    def abort(self) -> None:
        """Remove what was written aside; the corpus that was there before, if any, stays."""
        with suppress(OSError):  # what it still holds does not fit on the disk either
            self._data.close()
        for path in _all_paths(self.prefix):
            _aside(path).unlink(missing_ok=True)

    def __enter__(self) -> CorpusWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and not self._data.closed:
                self.finish()
        finally:
            self.abort()  # nothing is left aside after `finish`

    def _write_index(self, index: IO[bytes]) -> None:
        lengths = np.frombuffer(self._lengths, np.int32).astype("<i4")
        documents = np.arange(lengths.size + 1, dtype="<i8")
        if self.format is FLEETX:
            np.savez(index, lens=lengths, docs=documents)
            return
        pointers = np.zeros(lengths.size, "<i8")
        np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
        code = next(code for code, dtype in MEGATRON_DTYPES.items() if np.dtype(dtype) == self.dtype)
        index.write(MEGATRON_HEADER.pack(MEGATRON_MAGIC, MEGATRON_VERSION, code, lengths.size, documents.size))
        for part in (lengths, pointers * self.dtype.itemsize, documents):
            index.write(part.tobytes())


def _all_paths(prefix: Path) -> list[Path]:
    """Every file that a corpus of this prefix may own, indexes first."""
    both: list[FileFormat] = [MEGATRON, FLEETX]
    indexes = [file_format.index_path(prefix) for file_format in both]
    return [*indexes, Path(f"{prefix}{META_SUFFIX}"), *(file_format.data_path(prefix) for file_format in both)]


def _aside(path: Path) -> Path:
    """Where a file is written before it is renamed; the process id keeps two runs apart."""
    return path.with_name(f"{path.name}.tmp-{os.getpid()}")


def _npy_header(dtype: np.dtype, num_tokens: int) -> bytes:
    """Header of a one-row .npy file (format 1.0), always 128 bytes, so that it can be written anew at the end."""
    text = f"{{'descr': {dtype.str!r}, 'fortran_order': False, 'shape': ({num_tokens},), }}"
    start = b"\x93NUMPY\x01\x00" + (_NPY_HEADER_BYTES - 10).to_bytes(2, "little")
    return start + text.encode().ljust(_NPY_HEADER_BYTES - len(start) - 1) + b"\n"


def _sync_and_close(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
