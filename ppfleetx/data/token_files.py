"""One token corpus on disk: a pair of files and an optional sidecar, read memory-mapped.

    megatron   X.bin      ids end to end, no header
               X.idx      "MMIDIDX", version 1, dtype code, counts, sizes int32 [n], byte pointers int64 [n],
                          document index int64 [d + 1]
    fleetx     X_ids.npy  ids end to end, one NumPy array
               X_idx.npz  lens int32 [n] (tokens per document), docs int64 [d + 1]
    both       X_meta.json  CorpusMeta as JSON; written by our preprocessing, optional on reading

A document is one entry of `sizes` / `lens`, which is what the GPT datasets of Megatron-LM and PaddleFleetX cut their
splits by. Their document index groups entries (sentences) further; we write it and do not read it.

Shapes: n = documents, t = tokens. `boundaries` int64 [n + 1] are cumulative token offsets, from 0 to t.
"""

from __future__ import annotations

import json
import struct
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from ppfleetx.data.errors import BadInputError


@dataclass(frozen=True)
class FileFormat:
    """A corpus format: its name and what is appended to the prefix to get its two files."""

    name: str
    data_suffix: str
    index_suffix: str

    def data_path(self, prefix: Path) -> Path:
        return Path(f"{prefix}{self.data_suffix}")

    def index_path(self, prefix: Path) -> Path:
        return Path(f"{prefix}{self.index_suffix}")


MEGATRON = FileFormat("megatron", ".bin", ".idx")
FLEETX = FileFormat("fleetx", "_ids.npy", "_idx.npz")
FORMATS = {file_format.name: file_format for file_format in (MEGATRON, FLEETX)}
META_SUFFIX = "_meta.json"

#: start of a Megatron index, little-endian: magic, version, dtype code, number of sizes, length of the document index
MEGATRON_HEADER = struct.Struct("<9sQBQQ")
MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
MEGATRON_VERSION = 1
MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}


#: `CorpusMeta.shuffle_seed` of a sidecar that has no such field
UNTOLD = -1


@dataclass(frozen=True)
class CorpusMeta:
    """What our preprocessing knows of a corpus and the token files cannot say.

    Attributes:
        format: "megatron" or "fleetx".
        vocab_size: number of ids of the tokenizer.
        eos_id: end-of-document id of the tokenizer; None if it has none.
        num_documents: documents in the corpus.
        num_tokens: tokens in the corpus, end-of-document ids included.
        max_id: largest id in the corpus. That it is known also says that no id is negative.
        tokenizer: path of the tokenizer, as the user gave it.
        tokenizer_sha256: sha256 of the tokenizer's files, hexadecimal.
        bos_id: id that every document begins with; None if none was put there.
        shuffle_seed: seed of the documents' random order; None if they are in the order of the input; UNTOLD if the sidecar,
            of before there was the field, says neither.

    A reader passes over fields that it does not know. Fields with a default came later, and files may lack them.
    """

    format: str
    vocab_size: int
    eos_id: int | None
    num_documents: int
    num_tokens: int
    max_id: int
    tokenizer: str
    tokenizer_sha256: str
    bos_id: int | None = None
    shuffle_seed: int | None = UNTOLD


@dataclass(frozen=True)
class TokenFile:
    """One corpus, opened. `tokens` [t] (any integer dtype) is memory-mapped; `boundaries` is int64 [n + 1]."""

    prefix: Path
    format: FileFormat
    tokens: np.ndarray
    boundaries: np.ndarray
    meta: CorpusMeta | None


class BadCorpusError(BadInputError):
    """A corpus that cannot be used. `open_corpus` turns it into a UserError."""


class _BadFileError(BadCorpusError):
    """A file of a corpus is damaged."""

    def __init__(self, path: Path, reason: str):
        super().__init__(f"{path} {reason}", "make the corpus again with tools/preprocess_data.py, or copy it again")


def token_dtype(vocab_size: int) -> np.dtype:
    """dtype in which ids are stored: uint16 if vocab_size < 65535, else int32: the rule of PaddleFleetX."""
    return np.dtype("<u2") if vocab_size < 65535 else np.dtype("<i4")


def open_token_file(prefix: Path, file_format: FileFormat) -> TokenFile:
    """Open one corpus and check that its files fit together; reads the index, maps the ids.

    Args:
        prefix: path without the format's suffixes.
        file_format: which pair of files to read.

    Raises:
        BadCorpusError: a file is missing, empty, truncated, of another format, or contradicts its partner.
    """
    read = _read_megatron if file_format is MEGATRON else _read_fleetx
    for path in (file_format.index_path(prefix), file_format.data_path(prefix)):
        _check_not_empty(path)
    tokens, boundaries = read(prefix)
    meta = _read_meta(Path(f"{prefix}{META_SUFFIX}"), boundaries)
    return TokenFile(prefix, file_format, tokens, boundaries, meta)


def _check_not_empty(path: Path) -> None:
    try:
        with open(path, "rb") as file:
            if not file.read(1):
                raise _BadFileError(path, "is empty (0 bytes)")
    except OSError as error:
        raise _BadFileError(path, f"cannot be read: {error.strerror}") from None


def _cumulative(lengths: np.ndarray, path: Path) -> np.ndarray:
    """Token offsets int64 [n + 1] from documents' lengths [n]."""
    if lengths.size and int(lengths.min()) < 0:
        raise _BadFileError(path, "holds a document of negative length")
    boundaries = np.zeros(lengths.size + 1, np.int64)
    np.cumsum(lengths, dtype=np.int64, out=boundaries[1:])
    if boundaries[-1] == 0:
        raise _BadFileError(path, "lists no tokens")
    return boundaries


def _read_megatron(prefix: Path) -> tuple[np.ndarray, np.ndarray]:
    """(tokens [t], boundaries int64 [n + 1]) of X.bin and X.idx."""
    index_path, data_path = MEGATRON.index_path(prefix), MEGATRON.data_path(prefix)
    num_lengths, dtype = _read_megatron_header(index_path)
    lengths_at = MEGATRON_HEADER.size
    lengths = np.fromfile(index_path, "<i4", num_lengths, offset=lengths_at)
    pointers = np.fromfile(index_path, "<i8", num_lengths, offset=lengths_at + lengths.nbytes)
    boundaries = _cumulative(lengths, index_path)
    # one stream of tokens without gaps is what lets a sample be one slice
    if not np.array_equal(pointers, boundaries[:-1] * dtype.itemsize):
        raise _BadFileError(index_path, "has pointers that are not the cumulative sizes")
    num_tokens, data_bytes = int(boundaries[-1]), data_path.stat().st_size
    if data_bytes != num_tokens * dtype.itemsize:
        raise _BadFileError(
            data_path,
            f"has {data_bytes} bytes where {index_path.name} lists {num_tokens} tokens of {dtype.itemsize} bytes"
            f" = {num_tokens * dtype.itemsize} bytes",
        )
    return np.asarray(np.memmap(data_path, dtype, mode="r", shape=(num_tokens,))), boundaries


def _read_megatron_header(path: Path) -> tuple[int, np.dtype]:
    """(number of sizes, dtype of the ids), after checking that the file is as long as its header asks for."""
    with open(path, "rb") as file:
        header = file.read(MEGATRON_HEADER.size)
    if not header.startswith(MEGATRON_MAGIC):
        raise _BadFileError(path, f"is no Megatron index: it does not begin with {MEGATRON_MAGIC!r}")
    if len(header) < MEGATRON_HEADER.size:
        raise _BadFileError(path, f"is truncated: {len(header)} bytes, its header alone has {MEGATRON_HEADER.size}")
    _, version, code, num_lengths, num_entries = MEGATRON_HEADER.unpack(header)
    if version != MEGATRON_VERSION:
        raise _BadFileError(path, f"is a Megatron index of version {version}; version {MEGATRON_VERSION} is supported")
    if code not in MEGATRON_DTYPES:
        raise _BadFileError(path, f"has the dtype code {code}; codes 1 to 8 are known")
    dtype = np.dtype(MEGATRON_DTYPES[code])
    if dtype.kind == "f":
        raise _BadFileError(path, f"says that ids are stored as {dtype}; they must be integers")
    wanted, found = MEGATRON_HEADER.size + 12 * num_lengths + 8 * num_entries, path.stat().st_size
    if wanted != found:
        raise _BadFileError(path, f"has {found} bytes where its header ({num_lengths} documents) asks for {wanted}")
    return num_lengths, dtype


def _read_fleetx(prefix: Path) -> tuple[np.ndarray, np.ndarray]:
    """(tokens [t], boundaries int64 [n + 1]) of X_ids.npy and X_idx.npz."""
    index_path, data_path = FLEETX.index_path(prefix), FLEETX.data_path(prefix)
    lengths = _load_numpy(index_path, "lens")
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu":
        raise _BadFileError(
            index_path, f"has lens of dtype {lengths.dtype} and shape {lengths.shape}; int32 [n] is wanted"
        )
    tokens = _load_numpy(data_path, None)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise _BadFileError(data_path, f"holds {tokens.dtype} of shape {tokens.shape}; one row of integers is wanted")
    boundaries = _cumulative(lengths, index_path)
    if tokens.size != boundaries[-1]:
        raise _BadFileError(data_path, f"has {tokens.size} tokens where {index_path.name} lists {boundaries[-1]}")
    return tokens, boundaries


def _load_numpy(path: Path, member: str | None) -> np.ndarray:
    """The array of a .npy file, memory-mapped, or `member` of a .npz archive. Never unpickles."""
    try:
        loaded = np.load(path, mmap_mode=None if member else "r", allow_pickle=False)
        if member is None:
            return np.asarray(loaded)
        with loaded:
            return loaded[member]
    except Exception as error:  # of a damaged header NumPy and zipfile raise whatever they come to
        kind = f"NumPy archive with an array {member!r}" if member else "NumPy array file"
        raise _BadFileError(path, f"is no readable {kind}: {error}") from None


def _read_meta(path: Path, boundaries: np.ndarray) -> CorpusMeta | None:
    """The sidecar, if there is one; it must describe the files beside it."""
    if not path.exists():
        return None
    try:
        raw = json.loads(path.read_bytes())
        meta = CorpusMeta(**{field.name: raw[field.name] for field in fields(CorpusMeta) if _must_be_in(raw, field)})
        _check_numbers(meta)
        if type(meta.tokenizer_sha256) is not str:
            raise ValueError("tokenizer_sha256 in it is no text")
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise _BadFileError(path, f"is no readable sidecar: {error!r}") from None
    found = (boundaries.size - 1, int(boundaries[-1]))
    if (meta.num_documents, meta.num_tokens) != found:
        raise _BadFileError(
            path,
            f"belongs to another corpus: it says {meta.num_documents} documents and {meta.num_tokens} tokens,"
            f" the files hold {found[0]} and {found[1]}; delete it if the files were made by another tool",
        )
    return meta


def _must_be_in(raw: dict[str, Any], field: Field) -> bool:
    """Whether a sidecar's field is to be read: it is there, or it must be."""
    return field.default is MISSING or field.name in raw


def _check_numbers(meta: CorpusMeta) -> None:
    """Raises ValueError where a number of a sidecar cannot be one."""
    numbers = [meta.vocab_size, meta.num_documents, meta.num_tokens, meta.max_id]
    if any(type(number) is not int for number in numbers):
        raise ValueError("a count in it is no integer")
    for name, value in (("eos_id", meta.eos_id), ("bos_id", meta.bos_id)):
        if value is not None and (type(value) is not int or not 0 <= value < meta.vocab_size):
            raise ValueError(f"{name} {value} is no integer in [0, {meta.vocab_size})")
    if meta.shuffle_seed is not None and (type(meta.shuffle_seed) is not int or meta.shuffle_seed < UNTOLD):
        raise ValueError(f"shuffle_seed {meta.shuffle_seed!r} is no seed")
