"""Which tokens sample i of a run is: arithmetic and a keyed permutation, no index files.

A split of a corpus is a range of documents, hence T contiguous tokens. The stream is that range repeated epoch after
epoch. Stream sample j takes stream tokens [j*s, j*s + s], s = seq_len: s + 1 tokens, one shared with its neighbour.
In e epochs A(e) = (e*T - 1)//s samples fit, so epoch e holds the stream samples [A(e), A(e+1)), shuffled among
themselves. Run sample i is a pure function of (seed, source, epoch, i); max_steps, batch sizes, ranks and workers do
not enter.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_MASK32 = 0xFFFFFFFF


def split_documents(num_documents: int, split: Sequence[float]) -> list[int]:
    """Cut [0, num_documents) into train, evaluation and test: [0, end of train, end of evaluation, num_documents].

    Each share is rounded by itself and the excess of the sum is taken from every boundary, as in Megatron-LM and
    PaddleFleetX (whose boundaries can fall below 0; ours cannot): [969, 30, 1] of 1000 gives [0, 969, 999, 1000].

    Raises:
        ValueError: `split` is not three non-negative finite numbers with a positive sum.
    """
    total = sum(split) if len(split) == 3 else 0
    if not (0 < total < math.inf) or min(split) < 0:
        raise ValueError("split must be three numbers, none negative, with a positive sum")
    ends = [0]
    for share in split:
        ends.append(ends[-1] + round(share / total * num_documents))
    excess = ends[-1] - num_documents
    return [0] + [max(0, end - excess) for end in ends[1:]]


class KeyedPermutation:
    """A pseudo-random bijection of [0, n) that is computed, not stored.

    A Feistel network over the smallest power of two that holds n, walked until it lands below n (fewer than two steps
    on average). The key is the sha256 of (seed, source, epoch), eight words for eight rounds.

    Args:
        n: size of the domain, at least 1 and at most 2**62.
    """

    def __init__(self, n: int, seed: int, source: str, epoch: int):
        if not 1 <= n <= 1 << 62:
            raise ValueError(f"a permutation of {n} items")
        digest = hashlib.sha256(repr((seed, source, epoch)).encode()).digest()
        self._keys = [int.from_bytes(digest[at : at + 4], "little") for at in range(0, 32, 4)]
        bits = (n - 1).bit_length()
        self._low_bits = (bits + 1) // 2
        self._low_mask = (1 << self._low_bits) - 1
        self._high_mask = (1 << (bits - self._low_bits)) - 1
        self.n = n

    def at(self, index: int) -> int:
        """Where `index` goes."""
        if not 0 <= index < self.n:
            raise IndexError(f"{index} is not in [0, {self.n})")
        index = self._network(index)
        while index >= self.n:
            index = self._network(index)
        return index

    def take(self, indices: np.ndarray) -> np.ndarray:
        """Where each of `indices` (integers [k] in [0, n)) goes, int64 [k]."""
        out = self._network(indices.astype(np.uint64))
        while (outside := np.flatnonzero(out >= self.n)).size:
            out[outside] = self._network(out[outside])
        return out.astype(np.int64)

    def _network(self, value: Any) -> Any:
        """One pass; `value` is an int or uint64 [k], which the same arithmetic serves as no product exceeds 64 bits."""
        low, high = value & self._low_mask, value >> self._low_bits
        for number, key in enumerate(self._keys):
            if number % 2:
                low = low ^ (_mix32((high + key) & _MASK32) & self._low_mask)
            else:
                high = high ^ (_mix32((low + key) & _MASK32) & self._high_mask)
        return (high << self._low_bits) | low


def _mix32(x: Any) -> Any:
    """Scramble 32-bit values (int or uint64 [k]); a multiply-xorshift finaliser."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK32
    return x ^ (x >> 16)


@dataclass(frozen=True)
class SampleOrder:
    """The order of one split's samples.

    Attributes:
        num_tokens: T, tokens of one epoch; at least seq_len + 1, so that every epoch holds a sample.
        seq_len: s, tokens a sample predicts.
        seed: the run's data seed.
        source: name that keeps the orders of different sources apart.
    """

    num_tokens: int
    seq_len: int
    seed: int
    source: str

    def __post_init__(self) -> None:
        if self.seq_len < 1 or self.num_tokens < self.seq_len + 1:
            raise ValueError(f"{self.num_tokens} tokens hold no sample of {self.seq_len} + 1")

    def num_samples(self, epochs: int) -> int:
        """A(e): samples in the first `epochs` epochs."""
        return max(0, (epochs * self.num_tokens - 1) // self.seq_len)

    def epoch_of(self, index: int) -> int:
        """Epoch of run sample `index`: the largest e with A(e) <= index, which is e*T <= (index + 1)*s."""
        return (index + 1) * self.seq_len // self.num_tokens

    def stream_index(self, index: int) -> int:
        """Stream sample j that run sample `index` is."""
        epoch = self.epoch_of(index)
        first = self.num_samples(epoch)
        permutation = KeyedPermutation(self.num_samples(epoch + 1) - first, self.seed, self.source, epoch)
        return first + permutation.at(index - first)
