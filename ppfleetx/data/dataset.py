"""GPTDataset: samples of a split of a corpus, documents packed end to end.

Shapes: s = seq_len.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ppfleetx.config.errors import Problem, UserError
from ppfleetx.data.corpus import Corpus, open_corpus
from ppfleetx.data.order import SampleOrder, split_documents

_LOG = logging.getLogger("ppfleetx")

MODES = ("Train", "Eval", "Test")

#: corpora up to this size are read through at construction when no sidecar tells their largest id
_SCAN_LIMIT_BYTES = 64 << 20


#: files that `GPTDataset.describe` names at most
_TOLD_FILES = 3


@dataclass(frozen=True)
class DatasetSpec:
    """What a GPTDataset needs to know.

    Attributes:
        input_dir: a folder, a corpus prefix or a list of these (`Data.*.dataset.input_dir`).
        split: three shares of documents for Train, Eval, Test; only their ratio counts.
        mode: "Train", "Eval" or "Test".
        seq_len: tokens a sample predicts (`Data.*.dataset.max_seq_len`).
        seed: seed of the sample order.
        vocab_size: ids must lie in [0, vocab_size).
        eos_id: end-of-document id; None takes the corpus's own, if it is known.
    """

    input_dir: str | Path | Sequence[str | Path]
    split: Sequence[float]
    mode: str
    seq_len: int
    seed: int
    vocab_size: int
    eos_id: int | None = None


class Sample(NamedTuple):
    """ids int64 [s]; labels int64 [s], the ids one place on; loss_mask float32 [s], 0 where the id is EOS, else 1."""

    ids: np.ndarray
    labels: np.ndarray
    loss_mask: np.ndarray


class GPTDataset:
    """Samples of one split. Endless: sample i exists for every i >= 0, epoch after epoch. Writes nothing to disk.

    Attributes:
        corpus: what it is a split of.
        eos_id: end-of-document id; None if nothing tells.
        documents: numbers of the split's documents in the corpus.

    Raises:
        UserError: the corpus cannot be read, the split gives this mode no document or too few tokens for one sample,
            or ids do not fit the vocabulary. Large corpora without sidecar are not read through: there the last error
            comes from `__getitem__`.
    """

    def __init__(self, spec: DatasetSpec):
        self.spec = spec
        self._key = f"Data.{spec.mode}.dataset"
        self.corpus = open_corpus(spec.input_dir, f"{self._key}.input_dir")
        self.eos_id = self.corpus.eos_id if spec.eos_id is None else spec.eos_id
        if self.corpus.eos_id not in (None, self.eos_id):
            told = "%s.eos_id %d: the tokenizer of this corpus ends documents with id %d"
            _LOG.warning(told, self._key, self.eos_id, self.corpus.eos_id)
        self.documents = self._split_documents()
        self._first_token, self._num_tokens = self._split_tokens()
        # the mode is the source's name, so that equal token ranges under two modes are not read in the same order
        self._order = SampleOrder(self._num_tokens, spec.seq_len, spec.seed, spec.mode)
        self._ids_checked = self._check_all_ids(self.corpus)

    def describe(self) -> str:
        """Which documents these are, of which files; counted from 1."""
        files = self.corpus.files_of(self._first_token, self._first_token + self._num_tokens)
        names = [str(file.prefix) for file in files[:_TOLD_FILES]]
        more = f" and {len(files) - _TOLD_FILES} more" if len(files) > _TOLD_FILES else ""
        return f"{self._told_documents()} ({self._num_tokens:,} tokens) in {', '.join(names)}{more}"

    def _told_documents(self) -> str:
        first, last = self.documents.start + 1, self.documents.stop
        return f"documents {first:,} to {last:,} of {self.corpus.num_documents:,}"

    def num_samples(self, epochs: int = 1) -> int:
        """Samples in the first `epochs` epochs."""
        return self._order.num_samples(epochs)

    def epoch_of(self, index: int) -> int:
        """Epoch (from 0) of run sample `index`."""
        return self._order.epoch_of(index)

    def place_of(self, index: int) -> tuple[int, int, int]:
        """(first token of the split, its number of tokens, where in the endless stream of it) run sample `index` lies: tells
        which sample of the corpus it is."""
        return self._first_token, self._num_tokens, self._order.stream_index(index)

    def __getitem__(self, index: int) -> Sample:
        """Run sample `index`, any index >= 0.

        Raises:
            IndexError: the index is negative.
            UserError: an id does not fit the vocabulary, where that was not checked at construction.
        """
        if index < 0:
            raise IndexError(f"sample {index}: samples are counted from 0")
        tokens = self._stream_tokens(self._order.stream_index(index) * self.spec.seq_len)
        if not self._ids_checked:
            self._check_ids(int(tokens.min()), int(tokens.max()))
        ids, labels = tokens[:-1], tokens[1:]
        mask = np.ones(ids.size, np.float32) if self.eos_id is None else (ids != self.eos_id).astype(np.float32)
        return Sample(ids, labels, mask)

    def _stream_tokens(self, start: int) -> np.ndarray:
        """Tokens [start, start + s] of the endless stream, int64 [s + 1]; it wraps once at most, as s + 1 <= T."""
        start %= self._num_tokens
        length = self.spec.seq_len + 1
        head = min(length, self._num_tokens - start)
        tokens = self.corpus.read(self._first_token + start, head)
        if head == length:
            return tokens
        return np.concatenate([tokens, self.corpus.read(self._first_token, length - head)])

    def _split_documents(self) -> range:
        """This mode's documents, at least one."""
        spec, num_documents = self.spec, self.corpus.num_documents
        part = MODES.index(spec.mode)
        try:
            ends = split_documents(num_documents, spec.split)
        except ValueError as error:
            raise UserError(Problem(f"{self._key}.split", spec.split, str(error))) from None
        first, last = ends[part], ends[part + 1]
        if first == last:
            rule = f"{spec.mode} gets no document: the split cuts {num_documents} documents at {ends}"
            fix = f"use the split [{num_documents - 2}, 1, 1]" if num_documents > 2 else "add documents to the corpus"
            raise UserError(Problem(f"{self._key}.split", spec.split, rule, fix))
        return range(first, last)

    def _split_tokens(self) -> tuple[int, int]:
        """(first token, number of tokens) of this mode's documents."""
        spec, documents = self.spec, self.documents
        start, stop = (int(self.corpus.boundaries[document]) for document in (documents.start, documents.stop))
        if stop - start < spec.seq_len + 1:
            rule = (
                f"a sample takes max_seq_len + 1 = {spec.seq_len + 1} tokens;"
                f" {spec.mode} has {stop - start} ({self._told_documents()})"
            )
            raise UserError(Problem(f"{self._key}.max_seq_len", spec.seq_len, rule))
        return start, stop - start

    def _check_all_ids(self, corpus: Corpus) -> bool:
        """Check every id if a sidecar or a short scan can tell; False if neither can."""
        if corpus.max_id is not None:
            self._check_ids(0, corpus.max_id)
        elif corpus.num_bytes <= _SCAN_LIMIT_BYTES:
            self._check_ids(*corpus.scan_ids())
        else:
            return False
        return True

    def _check_ids(self, low: int, high: int) -> None:
        if low < 0 or high >= self.spec.vocab_size:
            bad = low if low < 0 else high
            rule = f"ids must lie in [0, Model.vocab_size = {self.spec.vocab_size}); the corpus holds id {bad}"
            fix = f"set Model.vocab_size to at least {high + 1}" if low >= 0 else ""
            raise UserError(Problem(f"{self._key}.input_dir", self.spec.input_dir, rule, fix))
