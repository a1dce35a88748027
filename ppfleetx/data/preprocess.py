"""Documents in, a token corpus out: what tools/preprocess_data.py does."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ppfleetx.config.errors import Problem, UserError
from ppfleetx.data.documents import DEFAULT_SUFFIXES, find_files, read_documents
from ppfleetx.data.prefetch import ordered_map
from ppfleetx.data.token_files import CorpusMeta
from ppfleetx.data.token_writer import CorpusWriter
from ppfleetx.data.tokenizers import Tokenizer, fingerprint, load_tokenizer

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
        split_by: what a document of plain text is: "file", "line" or "blank-line".
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
    split_by: str = "file"
    suffixes: Sequence[str] = DEFAULT_SUFFIXES
    workers: int = 1
    overwrite: bool = False


@dataclass(frozen=True)
class PreprocessSummary:
    """What a run did: counts, and its duration in seconds. Prints as one line."""

    output_prefix: str
    format: str
    num_files: int
    num_documents: int
    num_tokens: int
    num_empty: int
    duration_s: float

    def __str__(self) -> str:
        return (
            f"wrote {self.output_prefix} ({self.format}): {self.num_documents} documents, {self.num_tokens} tokens"
            f" from {self.num_files} files, {self.num_empty} empty documents skipped, {self.duration_s:.1f} s"
        )


class _Encoded(NamedTuple):
    """Tokenized documents, empty ones left out: ids int32 [sum of lengths], lengths int32 [documents]."""

    ids: np.ndarray
    lengths: np.ndarray
    num_empty: int


def preprocess_corpus(job: PreprocessJob, on_documents: Callable[[int], object] | None = None) -> PreprocessSummary:
    """Tokenize documents into a new corpus with its sidecar. A run that fails leaves nothing behind.

    Args:
        job: what to do.
        on_documents: called with the number of further documents done, for a progress bar.

    Raises:
        UserError: bad input or tokenizer, no document with text, or a corpus that would be overwritten.
    """
    started = time.perf_counter()
    tokenizer = load_tokenizer(job.tokenizer)
    if job.append_eos and tokenizer.eos_id is None:
        raise UserError(
            Problem("--append-eos", True, f"the tokenizer {job.tokenizer} must have an end-of-document token")
        )
    if job.workers < 1:
        raise UserError(Problem("--workers", job.workers, "at least 1 is needed"))
    files = find_files(job.inputs, job.suffixes)
    batches = _batches(read_documents(files, job.split_by, job.json_key))
    try:
        meta, num_empty = _write(job, tokenizer, batches, on_documents)
    except BrokenProcessPool:
        rule = "a worker was killed before its work was done, perhaps because memory ran out"
        raise UserError(Problem("--workers", job.workers, rule, "use fewer")) from None
    if meta is None:
        raise UserError(Problem("--input", list(job.inputs), f"no text in {len(files)} files"))
    duration_s = time.perf_counter() - started
    return PreprocessSummary(
        job.output_prefix, job.format, len(files), meta.num_documents, meta.num_tokens, num_empty, duration_s
    )


def _write(
    job: PreprocessJob,
    tokenizer: Tokenizer,
    batches: Iterable[list[str]],
    on_documents: Callable[[int], object] | None,
) -> tuple[CorpusMeta | None, int]:
    """Writes the corpus: (its sidecar, empty documents), the sidecar None and nothing written where there is no text."""
    num_empty = 0
    with CorpusWriter(job.output_prefix, job.format, tokenizer.vocab_size, overwrite=job.overwrite) as writer:
        for encoded in _encode_all(batches, tokenizer, job):
            writer.append_batch(encoded.ids, encoded.lengths)
            num_empty += encoded.num_empty
            if on_documents:
                on_documents(encoded.lengths.size + encoded.num_empty)
        if writer.num_documents == 0:
            writer.abort()
            return None, num_empty
        return writer.finish(tokenizer.eos_id, job.tokenizer, fingerprint(tokenizer)), num_empty


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
    eos_id = tokenizer.eos_id if job.append_eos else None
    if job.workers == 1:
        return (_encode(tokenizer, eos_id, batch) for batch in batches)
    executor = ProcessPoolExecutor(
        job.workers,
        mp_context=multiprocessing.get_context("spawn"),  # forking a process that has threads is unsafe
        initializer=_start_worker,
        initargs=(job.tokenizer, eos_id),
    )
    return ordered_map(executor, _encode_in_worker, batches, ahead=2 * job.workers)


def _encode(tokenizer: Tokenizer, eos_id: int | None, documents: list[str]) -> _Encoded:
    """Encode documents, each followed by `eos_id` if given; those without text or without ids are counted only."""
    with_text = [document for document in documents if document and not document.isspace()]
    encoded = [ids for ids in tokenizer.encode_batch(with_text) if ids]
    if eos_id is not None:
        for ids in encoded:
            ids.append(eos_id)
    lengths = np.array([len(ids) for ids in encoded], np.int32)
    flat = np.fromiter((index for ids in encoded for index in ids), np.int32, count=int(lengths.sum(dtype=np.int64)))
    return _Encoded(flat, lengths, len(documents) - len(encoded))


#: tokenizer and end-of-document id of a worker process, set once when it starts
_worker_state: tuple[Tokenizer, int | None] | None = None


def _start_worker(tokenizer_path: str, eos_id: int | None) -> None:
    global _worker_state
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _worker_state = (load_tokenizer(tokenizer_path), eos_id)


def _end_with_parent() -> None:
    """Ends a worker whose parent was killed: it would wait for work for ever, and hold open what its parent wrote to."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has a parent"
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def _encode_in_worker(documents: list[str]) -> _Encoded:
    assert _worker_state is not None, "a worker encodes before it was started"
    return _encode(*_worker_state, documents)
