"""Documents in, a token corpus out: what tools/preprocess_data.py does."""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.connection
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ppfleetx.config.errors import Problem, UserError
from ppfleetx.data.document_marks import BOS, EOS, Mark, missing
from ppfleetx.data.documents import DEFAULT_SUFFIXES, Meter, Reading, find_files, read_documents
from ppfleetx.data.prefetch import ordered_map
from ppfleetx.data.progress import OnProgress, Progress
from ppfleetx.data.shuffle import DocumentShuffler, check_seed
from ppfleetx.data.token_files import CorpusMeta
from ppfleetx.data.token_writer import CorpusWriter
from ppfleetx.data.tokenizers import MarkChoice, Tokenizer, fingerprint, load_tokenizer

_LOG = logging.getLogger("ppfleetx")

#: a batch of documents for one call of the tokenizer ends at either
_BATCH_DOCUMENTS = 512
_BATCH_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class PreprocessJob:
    """One run of the preprocessing.

    Attributes:
        inputs: files and folders.
        output_prefix: path of the corpus without suffixes.
        tokenizer: path of the tokenizer.
        format: "megatron" or "fleetx".
        json_key: key of the text in JSON lines.
        append_eos: end every document with the tokenizer's end-of-document id.
        eos_token: the token that ends documents; None: what the tokenizer's files say, else a guess, which is said.
        prepend_bos: begin every document with the tokenizer's begin-of-document id.
        bos_token: the token that begins documents; None as for `eos_token`.
        shuffle: seed of a random order of the documents; None keeps the order of the input.
        split_by: what a document of plain text is: "file", "line" or "blank-line".
        input_format: "text" or "json" (lines) for all files; "auto" goes by their endings.
        suffixes: endings of the files taken from folders.
        workers: processes that tokenize; 1 does it in this one. The corpus is the same for every number.
        overwrite: replace a corpus that is there.
    """

    inputs: Sequence[str]
    output_prefix: str
    tokenizer: str
    format: str = "megatron"
    json_key: str = "text"
    append_eos: bool = False
    eos_token: str | None = None
    prepend_bos: bool = False
    bos_token: str | None = None
    shuffle: int | None = None
    split_by: str = "file"
    input_format: str = "auto"
    suffixes: Sequence[str] = DEFAULT_SUFFIXES
    workers: int = 1
    overwrite: bool = False

    @property
    def reading(self) -> Reading:
        return Reading(self.split_by, self.json_key, self.input_format, self.suffixes)

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer, with the tokens that mark documents.

        Raises:
            UserError: it cannot be used, or lacks such a token.
        """
        tokenizer = load_tokenizer(self.tokenizer, marks=MarkChoice(self.eos_token, self.bos_token, self.prepend_bos))
        if self.append_eos and tokenizer.eos is None:
            raise missing(EOS, "--append-eos", self.tokenizer, tokenizer.vocab())
        if self.prepend_bos and tokenizer.bos is None:
            raise missing(BOS, "--prepend-bos", self.tokenizer, tokenizer.vocab())
        return tokenizer


@dataclass(frozen=True)
class PreprocessSummary:
    """What a run did: counts, its duration in seconds, and what marks documents and their order. Prints as two lines."""

    output_prefix: str
    format: str
    num_files: int
    num_documents: int
    num_tokens: int
    num_empty: int
    duration_s: float
    bos: Mark | None = None
    eos: Mark | None = None
    shuffle: int | None = None

    def __str__(self) -> str:
        marks = ((self.bos, "begins"), (self.eos, "ends"))
        told = [f"each {verb} with {mark.text!r} (id {mark.id}, {mark.source})" for mark, verb in marks if mark]
        told.append(f"shuffled with seed {self.shuffle}" if self.shuffle is not None else "in the order of the input")
        return (
            f"wrote {self.output_prefix} ({self.format}): {self.num_documents} documents, {self.num_tokens} tokens"
            f" from {self.num_files} files, {self.num_empty} empty documents skipped, {self.duration_s:.1f} s\n"
            f"documents: {', '.join(told)}"
        )


class _Encoded(NamedTuple):
    """Tokenized documents, empty ones left out: ids int32 [sum of lengths], lengths int32 [documents]."""

    ids: np.ndarray
    lengths: np.ndarray
    num_empty: int


def preprocess_corpus(job: PreprocessJob, on_progress: OnProgress | None = None) -> PreprocessSummary:
    """Tokenize documents into a new corpus with its sidecar. A run that fails leaves nothing behind.

    Args:
        job: what to do.
        on_progress: called after every batch of documents.

    Raises:
        UserError: bad input or tokenizer, no document with text, or a corpus that would be overwritten.
    """
    started = time.perf_counter()
    _check(job)
    tokenizer = job.load_tokenizer()
    _warn_of_guesses(tokenizer)
    files = find_files(job.inputs, job.suffixes)
    try:
        meta, num_empty = _write(job, tokenizer, files, on_progress)
    except BrokenProcessPool:
        rule = "a worker was killed before its work was done, perhaps because memory ran out"
        raise UserError(Problem("--workers", job.workers, rule, "use fewer")) from None
    if meta is None:
        raise UserError(Problem("--input", list(job.inputs), f"no text in {len(files)} files"))
    duration_s = time.perf_counter() - started
    counts = (len(files), meta.num_documents, meta.num_tokens, num_empty, duration_s)
    eos = tokenizer.eos if job.append_eos else None
    return PreprocessSummary(job.output_prefix, job.format, *counts, bos=tokenizer.bos, eos=eos, shuffle=job.shuffle)


def _check(job: PreprocessJob) -> None:
    if job.workers < 1:
        raise UserError(Problem("--workers", job.workers, "at least 1 is needed"))
    if job.shuffle is not None:
        check_seed(job.shuffle)
    if job.bos_token is not None and not job.prepend_bos:
        raise UserError(Problem(BOS.option, job.bos_token, "it names the token of --prepend-bos", "add --prepend-bos"))


def _warn_of_guesses(tokenizer: Tokenizer) -> None:
    for kind, mark in ((EOS, tokenizer.eos), (BOS, tokenizer.bos)):
        if mark and mark.guessed:
            told = "the %s token is %s to be %r (id %d), as no file of the tokenizer says; %s TOKEN names another"
            _LOG.warning(told, kind.title, mark.source.replace(" by its name", ""), mark.text, mark.id, kind.option)


def _write(
    job: PreprocessJob, tokenizer: Tokenizer, files: Sequence[Path], on_progress: OnProgress | None
) -> tuple[CorpusMeta | None, int]:
    """Writes the corpus: (its sidecar, empty documents), the sidecar None and nothing written where there is no text."""
    meter = Meter(files)
    batches = _batches(read_documents(files, job.reading, meter))
    report = _Report(meter, on_progress)
    with ExitStack() as stack:
        writer = stack.enter_context(
            CorpusWriter(job.output_prefix, job.format, tokenizer.vocab_size, overwrite=job.overwrite)
        )
        shuffler = None
        if job.shuffle is not None:
            told = ("--output-prefix", job.output_prefix)
            shuffler = stack.enter_context(DocumentShuffler(job.shuffle, writer.dtype, writer.prefix.parent, told=told))
        for encoded in _encode_all(batches, tokenizer, job):
            (shuffler or writer).append_batch(encoded.ids, encoded.lengths)
            report.tokenized(encoded)
        for ids, lengths in shuffler.drain() if shuffler else ():
            writer.append_batch(ids, lengths)
            report.shuffled(writer)
        if writer.num_documents == 0:
            writer.abort()
            return None, report.num_empty
        meta = writer.finish(
            tokenizer.eos_id,
            job.tokenizer,
            fingerprint(tokenizer),
            bos_id=tokenizer.bos.id if tokenizer.bos else None,
            shuffle_seed=job.shuffle,
        )
    return meta, report.num_empty


class _Report:
    """Counts what is done and tells it to `on_progress`."""

    def __init__(self, meter: Meter, on_progress: OnProgress | None):
        self._meter, self._on_progress = meter, on_progress
        self._started = time.perf_counter()
        self._num_documents = self._num_tokens = self.num_empty = 0

    def tokenized(self, encoded: _Encoded) -> None:
        self._num_documents += encoded.lengths.size
        self._num_tokens += encoded.ids.size
        self.num_empty += encoded.num_empty
        if self._on_progress:
            rate = self._num_tokens / max(time.perf_counter() - self._started, 1e-9)
            note = (
                f"{self._num_documents:,} documents, {self._num_tokens / 1e6:,.1f}M tokens, {rate / 1e6:.2f}M tokens/s"
            )
            self._on_progress(Progress("tokenizing", self._meter.done, self._meter.total, note=note))

    def shuffled(self, writer: CorpusWriter) -> None:
        if self._on_progress:
            note = f"{writer.num_documents:,} of {self._num_documents:,} documents"
            self._on_progress(Progress("shuffling", writer.num_tokens, self._num_tokens, " tokens", note))


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document)
        if len(batch) >= _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _encode_all(batches: Iterable[list[str]], tokenizer: Tokenizer, job: PreprocessJob) -> Iterator[_Encoded]:
    """Encode batches in order, here or in processes."""
    if job.workers == 1:
        return (_encode(tokenizer, job.append_eos, batch) for batch in batches)
    executor = ProcessPoolExecutor(
        job.workers,
        mp_context=multiprocessing.get_context("spawn"),  # forking a process that has threads is unsafe
        initializer=_start_worker,
        initargs=(job,),
    )
    return ordered_map(executor, _encode_in_worker, batches, ahead=2 * job.workers)


def _encode(tokenizer: Tokenizer, append_eos: bool, documents: list[str]) -> _Encoded:
    """Encode documents, each between the tokenizer's marks; those without text or without ids are counted only."""
    with_text = [document for document in documents if document and not document.isspace()]
    encoded = [ids for ids in tokenizer.encode_batch(with_text) if ids]
    begin = [tokenizer.bos.id] if tokenizer.bos else []
    end = [tokenizer.eos.id] if append_eos and tokenizer.eos else []
    if begin or end:
        encoded = [begin + ids + end for ids in encoded]
    lengths = np.array([len(ids) for ids in encoded], np.int32)
    flat = np.fromiter((index for ids in encoded for index in ids), np.int32, count=int(lengths.sum(dtype=np.int64)))
    return _Encoded(flat, lengths, len(documents) - len(encoded))


#: tokenizer of a worker process and whether it ends documents, set once when it starts
_worker_state: tuple[Tokenizer, bool] | None = None


def _start_worker(job: PreprocessJob) -> None:
    global _worker_state
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _worker_state = (job.load_tokenizer(), job.append_eos)


def _end_with_parent() -> None:
    """Ends a worker whose parent was killed: it would wait for work for ever, and hold open what its parent wrote to."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has a parent"
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def _encode_in_worker(documents: list[str]) -> _Encoded:
    assert _worker_state is not None, "a worker encodes before it was started"
    return _encode(*_worker_state, documents)
