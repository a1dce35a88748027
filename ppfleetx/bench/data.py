"""What opening a large corpus costs: seconds and extra memory until the first sample can be asked for."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np

from ppfleetx.data import DatasetSpec, GPTDataset
from ppfleetx.data.token_files import MEGATRON, MEGATRON_HEADER, MEGATRON_MAGIC, MEGATRON_VERSION

_UINT16 = 8  # Megatron's code of the ids' type
_MIB = 2**20


def measure_data(folder: Path, num_documents: int, num_tokens: int, rounds: int) -> dict[str, Any]:
    """Opens a corpus of `num_documents` documents and about `num_tokens` tokens, `rounds` times; the result as JSON values.

    Args:
        folder: empty; gets the corpus, whose token file is sparse (ids 0 that take no disk).
        rounds: openings that are timed; two more, untimed, measure memory.
    """
    spec = DatasetSpec(
        write_sparse_corpus(folder / "corpus", num_documents, num_tokens), [969, 30, 1], "Train", 1024, 1024, 50304
    )
    resident = _resident_growth(spec)
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        dataset = GPTDataset(spec)
        seconds.append(time.perf_counter() - began)
        del dataset
    tracemalloc.start()
    dataset = GPTDataset(spec)
    traced = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {
        "documents": num_documents,
        "tokens": dataset.corpus.num_tokens,
        "samples": dataset.num_samples(),
        "seconds": seconds,
        "seconds_min": min(seconds),
        "seconds_median": float(np.median(seconds)),
        "peak_traced_mib": traced / _MIB,
        "peak_resident_growth_mib": resident,
    }


def data_lines(result: dict[str, Any]) -> list[str]:
    """The result for a reader."""
    resident = result["peak_resident_growth_mib"]
    return [
        f"{result['documents']:,} documents, {result['tokens']:,} tokens, {result['samples']:,} samples an epoch",
        "opened in " + ", ".join(f"{one:.4f}" for one in result["seconds"]) + " s",
        f"peak resident growth {'not known' if resident is None else f'{resident:.1f} MiB'} (mapped file pages included)",
        f"set-up = {result['seconds_median']:.4f} s median, {result['seconds_min']:.4f} s min (budget 0.5 s); "
        f"extra memory = {result['peak_traced_mib']:.1f} MiB (budget 100 MB)",
    ]


def write_sparse_corpus(prefix: Path, num_documents: int, num_tokens: int) -> Path:
    """A Megatron corpus of equal documents whose token file is a hole; returns `prefix`."""
    lengths = np.full(num_documents, num_tokens // num_documents, "<i4")
    pointers = np.arange(num_documents, dtype="<i8") * (int(lengths[0]) * 2)
    with open(MEGATRON.index_path(prefix), "wb") as index:
        index.write(MEGATRON_HEADER.pack(MEGATRON_MAGIC, MEGATRON_VERSION, _UINT16, num_documents, num_documents + 1))
        for array in (lengths, pointers, np.arange(num_documents + 1, dtype="<i8")):
            array.tofile(index)
    with open(MEGATRON.data_path(prefix), "wb") as tokens:
        tokens.truncate(int(lengths.sum(dtype=np.int64)) * 2)
    return prefix


def _resident_growth(spec: DatasetSpec) -> float | None:
    """MiB by which the resident memory rises at most while the dataset opens; None where Linux does not tell."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before = _status_mib("VmRSS")
        dataset = GPTDataset(spec)
        after = _status_mib("VmHWM")
        del dataset
    except (OSError, StopIteration):
        return None
    return after - before


def _status_mib(field: str) -> float:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024
