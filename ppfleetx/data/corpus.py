"""The corpora that a dataset reads, joined into one stream of tokens.

Shapes: n = documents of all files, t = tokens of all files.
"""

from __future__ import annotations

import bisect
import hashlib
import logging
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ppfleetx.config.errors import Problem, UserError
from ppfleetx.data.token_files import FORMATS, BadCorpusError, FileFormat, TokenFile, open_token_file

_LOG = logging.getLogger("ppfleetx")
_SCAN_TOKENS = 1 << 22
#: tokens of each place of a file that `Corpus.mark` looks at
_MARK_TOKENS = 512


class Corpus:
    """Token files end to end.

    Attributes:
        files: the token files, in reading order.
        boundaries: int64 [n + 1], cumulative token offsets of the documents, from 0 to t.
        eos_id: end-of-document id; None if no sidecar tells.
        tokenizer_sha256: of the tokenizer's files; None if no sidecar tells.
        max_id: largest id, and the word that none is negative; None unless every file has a sidecar.

    Raises:
        BadCorpusError: sidecars disagree about the tokenizer.
    """

    def __init__(self, files: Sequence[TokenFile]):
        self.files = tuple(files)
        self._starts = [0]
        for file in files:
            self._starts.append(self._starts[-1] + file.tokens.size)
        parts = [file.boundaries[1:] + start for file, start in zip(files, self._starts[:-1], strict=True)]
        self.boundaries = np.concatenate([np.zeros(1, np.int64), *parts])
        self.eos_id = _agreed(files, "eos_id")
        _agreed(files, "vocab_size")
        self.tokenizer_sha256 = _agreed(files, "tokenizer_sha256")
        known = [file.meta.max_id for file in files if file.meta]
        self.max_id = max(known) if len(known) == len(files) else None

    @property
    def in_input_order(self) -> bool:
        """Whether a file is known to hold its documents in the order of the input, not shuffled."""
        return any(file.meta is not None and file.meta.shuffle_seed is None for file in self.files)

    def files_of(self, first: int, stop: int) -> list[TokenFile]:
        """The files that hold tokens [first, stop), in reading order."""
        bounds = zip(self.files, self._starts[:-1], self._starts[1:], strict=True)
        return [file for file, start, end in bounds if start < stop and first < end]

    @property
    def num_documents(self) -> int:
        return self.boundaries.size - 1

    @property
    def num_tokens(self) -> int:
        return self._starts[-1]

    @property
    def num_bytes(self) -> int:
        """Bytes that the ids take on disk."""
        return sum(file.tokens.nbytes for file in self.files)

    @cached_property
    def mark(self) -> str:
        """A hash of the files' lengths and of a few tokens at the beginning, the middle and the end of each: tells whether they
        were changed or come in another order, without reading them through."""
        digest = hashlib.sha256()
        for file, start in zip(self.files, self._starts[:-1], strict=True):
            count = min(file.tokens.size, _MARK_TOKENS)
            digest.update(f"{file.boundaries.size - 1} documents, {file.tokens.size} tokens\n".encode())
            for first in (0, (file.tokens.size - count) // 2, file.tokens.size - count):
                digest.update(self.read(start + first, count).astype("<i8").tobytes())
        return digest.hexdigest()

    def read(self, start: int, length: int) -> np.ndarray:
        """Tokens [start, start + length) of the joined stream, int64 [length]; a copy.

        Raises:
            IndexError: the range leaves [0, t).
        """
        if start < 0 or length < 0 or start + length > self.num_tokens:
            raise IndexError(f"tokens [{start}, {start + length}) of a corpus of {self.num_tokens}")
        out = np.empty(length, np.int64)
        index, filled = bisect.bisect_right(self._starts, start) - 1, 0
        while filled < length:
            offset = start + filled - self._starts[index]
            piece = self.files[index].tokens[offset : offset + length - filled]
            out[filled : filled + piece.size] = piece
            filled += piece.size
            index += 1
        return out

    def scan_ids(self) -> tuple[int, int]:
        """(smallest, largest) id, by reading every token, a few MiB at a time."""
        lows, highs = [], []
        for file in self.files:
            for start in range(0, file.tokens.size, _SCAN_TOKENS):
                chunk = file.tokens[start : start + _SCAN_TOKENS]
                lows.append(int(chunk.min()))
                highs.append(int(chunk.max()))
        return min(lows), max(highs)


def open_corpus(input_dir: str | Path | Sequence[str | Path], key: str = "input_dir") -> Corpus:
    """Open a folder (all its corpora, sorted by name), one corpus (`data/b`), or a list of these, and join them.

    Logs which corpora are used. Nothing is written, neither beside the data nor elsewhere.

    Args:
        input_dir: as in `Data.*.dataset.input_dir`.
        key: YAML key or option to name in errors.

    Raises:
        UserError: nothing is there, half of a pair is missing, or a file is damaged.
    """
    places = [input_dir] if isinstance(input_dir, (str, Path)) else list(input_dir)
    try:
        found = [pair for place in places for pair in _find(Path(place).expanduser())]
        files = [open_token_file(prefix, file_format) for prefix, file_format in found]
        if not files:
            raise BadCorpusError("at least one folder or corpus must be named")
        corpus = Corpus(files)
    except BadCorpusError as bad:
        value = str(input_dir) if isinstance(input_dir, Path) else input_dir
        raise UserError(Problem(key, value, bad.rule, bad.fix)) from None
    for file in files:
        counts = f"{file.boundaries.size - 1} documents, {file.tokens.size} tokens"
        _LOG.info("%s: using %s (%s, %s)", key, file.prefix, file.format.name, counts)
    return corpus


def _find(place: Path) -> list[tuple[Path, FileFormat]]:
    """The corpora at `place`, a folder or a prefix, in sorted order."""
    if not place.is_dir():
        # a file of the pair may be named in place of the prefix
        suffix = next((suffix for suffix in _suffixes() if place.name.endswith(suffix)), "")
        prefix = place.with_name(place.name.removesuffix(suffix)) if suffix else place
        return [(prefix, _format_of(prefix))]
    try:
        names = [path.name for path in place.iterdir() if path.is_file() and not path.name.startswith(".")]
    except OSError as error:
        raise BadCorpusError(f"the folder {place} must be readable: {error.strerror}") from None
    stems = {name.removesuffix(suffix) for name in names for suffix in _suffixes() if name.endswith(suffix)}
    if not stems:
        rule = f"{place} must hold X.bin and X.idx, or X_ids.npy and X_idx.npz; it holds {len(names)} other files"
        raise BadCorpusError(rule, "make token files with tools/preprocess_data.py")
    return [(place / stem, _format_of(place / stem)) for stem in sorted(stems)]


def _suffixes() -> list[str]:
    return [suffix for each in FORMATS.values() for suffix in (each.data_suffix, each.index_suffix)]


def _format_of(prefix: Path) -> FileFormat:
    """The format in which `prefix` exists, both files of it."""
    present: list[FileFormat] = []
    for file_format in FORMATS.values():
        paths = [file_format.data_path(prefix), file_format.index_path(prefix)]
        missing = [path for path in paths if not path.is_file()]
        if len(missing) == 1:
            other = paths[0] if missing[0] == paths[1] else paths[1]
            raise BadCorpusError(f"{other} needs {missing[0]} beside it, which is missing")
        if not missing:
            present.append(file_format)
    if not present:
        rule = f"there is no folder {prefix}, nor {prefix}.bin and .idx, nor {prefix}_ids.npy and _idx.npz"
        raise BadCorpusError(rule)
    if len(present) > 1:
        rule = f"{prefix} must exist in one format; it has .bin and .idx as well as _ids.npy and _idx.npz"
        raise BadCorpusError(rule, "move one of them to another folder")
    return present[0]


def _agreed(files: Sequence[TokenFile], name: str) -> Any:
    """The value of a sidecar field that all files which know it agree on; None if none knows it."""
    known = {str(file.prefix): getattr(file.meta, name) for file in files if file.meta}
    values = {value for value in known.values() if value not in (None, "")}
    if len(values) > 1:
        told = ", ".join(f"{prefix}: {value}" for prefix, value in known.items())
        rule = f"corpora read together must come from one tokenizer, but their {name} differ ({told})"
        raise BadCorpusError(rule, "tokenize them with the same tokenizer")
    return values.pop() if values else None
