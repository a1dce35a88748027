"""GlobalBatchSampler: which run samples a data rank takes at a position of the run.

Shapes: local = global_batch_size / data_size.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

#: stands in a batch for a sample that is not there
PADDING = -1


class GlobalBatchSampler:
    """Cuts the run's samples into global batches and those into the data ranks' parts.

    The position is the number of global samples consumed, whatever batch sizes consumed them: the batch at position c
    is the run samples [c, c + global_batch_size), and rank r takes the r-th of data_size equal slices.

    Args:
        global_batch_size: samples of one update over all data ranks.
        data_rank, data_size: this rank's place among the data ranks (dp x sharding).
        num_samples: where the run's samples end; None: never.
        drop_last: leave out a last batch that is not full. If False, it is spread evenly: the first ranks take one
            sample more than the others where it does not divide, and every rank fills up with PADDING.
    """

    def __init__(
        self, global_batch_size: int, data_rank: int, data_size: int, num_samples: int | None, drop_last: bool
    ):
        if global_batch_size < 1 or global_batch_size % data_size:
            raise ValueError(f"global_batch_size {global_batch_size} is no multiple of data_size {data_size}")
        if not 0 <= data_rank < data_size:
            raise ValueError(f"data_rank {data_rank} is not in [0, {data_size})")
        self.global_batch_size = global_batch_size
        self.data_rank = data_rank
        self.data_size = data_size
        self.num_samples = num_samples
        self.drop_last = drop_last
        self.local_batch_size = global_batch_size // data_size

    def __len__(self) -> int:
        """Global batches from position 0.

        Raises:
            TypeError: the sampler is endless.
        """
        if self.num_samples is None:
            raise TypeError("an endless sampler has no length")
        rounding_up = 0 if self.drop_last else self.global_batch_size - 1
        return (self.num_samples + rounding_up) // self.global_batch_size

    def has_batch(self, consumed: int) -> bool:
        """Whether there is a batch at this position."""
        if self.num_samples is None:
            return True
        return consumed + (self.global_batch_size if self.drop_last else 1) <= self.num_samples

    def batch_at(self, consumed: int) -> np.ndarray:
        """This rank's part of the global batch that starts after `consumed` samples: sample ids, int64 [local].

        Raises:
            IndexError: there is no batch at this position.
        """
        if consumed < 0 or not self.has_batch(consumed):
            raise IndexError(f"no batch after {consumed} of {self.num_samples} samples")
        left = self.global_batch_size
        if self.num_samples is not None:
            left = min(left, self.num_samples - consumed)
        share, more = divmod(left, self.data_size)
        first = consumed + self.data_rank * share + min(self.data_rank, more)
        count = share + (self.data_rank < more)
        batch = np.full(self.local_batch_size, PADDING, np.int64)
        batch[:count] = np.arange(first, first + count)
        return batch

    def positions(self, consumed: int = 0) -> Iterator[int]:
        """Positions of the batches from `consumed` on: consumed, consumed + global_batch_size, …"""
        while self.has_batch(consumed):
            yield consumed
            consumed += self.global_batch_size
