"""Batches of a data rank, in order, read ahead by threads.

Shapes: local = this rank's samples of a global batch, s = seq_len.
"""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from ppfleetx.data.dataset import GPTDataset
from ppfleetx.data.prefetch import ordered_map
from ppfleetx.data.sampler import PADDING, GlobalBatchSampler

#: batches read ahead by each worker
_AHEAD_PER_WORKER = 2


@dataclass(frozen=True)
class Batch:
    """One rank's part of a global batch.

    Attributes:
        ids: int64 [local, s], input tokens.
        labels: int64 [local, s], the ids one place on.
        loss_mask: float32 [local, s], 1 where a label counts.
        sample_ids: int64 [local], run samples; -1 marks padding, whose ids, labels and loss_mask are 0.
        epoch: epoch of the global batch's first sample, the same on every rank.
    """

    ids: np.ndarray
    labels: np.ndarray
    loss_mask: np.ndarray
    sample_ids: np.ndarray
    epoch: int


def load_batches(
    dataset: GPTDataset, sampler: GlobalBatchSampler, consumed: int = 0, num_workers: int = 0
) -> Generator[Batch, None, None]:
    """Batches from the position `consumed` on; ends where the sampler does.

    Args:
        consumed: global samples consumed before the first batch.
        num_workers: threads that read ahead; 0 reads when asked. Threads, because reading is a slice of mapped memory:
            processes would add copies and must not be forked beside communication threads. The batches are the same
            for every number.

    Raises:
        An error of the dataset, unchanged, at the `next` whose batch it concerns. The threads end with the iterator:
        when it is exhausted, fails, or is closed.
    """

    def load(position: int) -> Batch:
        return _collate(dataset, sampler.batch_at(position), dataset.epoch_of(position))

    positions = sampler.positions(consumed)
    if num_workers == 0:
        yield from map(load, positions)
        return
    executor = ThreadPoolExecutor(num_workers, thread_name_prefix="ppfleetx-data")
    yield from ordered_map(executor, load, positions, ahead=_AHEAD_PER_WORKER * num_workers)


def _collate(dataset: GPTDataset, sample_ids: np.ndarray, epoch: int) -> Batch:
    """Stack the samples; rows of padding stay 0."""
    shape = (sample_ids.size, dataset.spec.seq_len)
    ids, labels, loss_mask = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape, np.float32)
    for row, sample_id in enumerate(sample_ids.tolist()):
        if sample_id != PADDING:
            ids[row], labels[row], loss_mask[row] = dataset[sample_id]
    return Batch(ids, labels, loss_mask, sample_ids, epoch)
