"""Random numbers for initial weights that depend on no layout and no device. NumPy only; imports no Paddle.

A parameter's numbers are a function of (seed, logical name, index in the whole parameter). The parameter's elements,
in row-major order, are drawn in blocks of BLOCK; block j starts a Philox generator of its own, keyed by (seed, name)
and counting from j · 2^192. A rank draws the blocks its part touches and keeps its part, so cutting never changes a
number, and no rank ever holds a copy of the whole. (NumPy promises Philox's bits for ever, but not its normal sampler:
a test with fixed values watches that.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

#: elements drawn from one generator state; part of the definition of the numbers, so never change it
BLOCK = 65536


class InitStream:
    """The stream of one logical parameter, e.g. `InitStream(1024, "blocks.7.attention.qkv.weight")`."""

    def __init__(self, seed: int, name: str):
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        self._key = np.frombuffer(digest[:16], dtype="<u8").astype(np.uint64)

    def normal(
        self, shape: Sequence[int], std: float = 1.0, box: Sequence[slice] | None = None, mean: float = 0.0
    ) -> NDArray[np.float32]:
        """Normal numbers for the part `box` of a parameter of the full `shape`.

        Args:
            shape: shape of the whole parameter.
            std, mean: of the distribution.
            box: one slice a dim (no steps) saying which part to return; None is the whole.

        Returns:
            float32 array of the box's shape: exactly `normal(shape, std, mean=mean)[box]`. Time goes with the blocks
            that the box touches (a column cut touches all of them), memory with the box.

        Raises:
            ValueError: the box has another number of dims, a step, or reaches beyond the shape.
        """
        bounds = _bounds(shape, box)
        starts, length = _runs(shape, bounds)
        out = np.empty(len(starts) * length, dtype=np.float32)
        if out.size:
            for block in range(int(starts[0]) // BLOCK, (int(starts[-1]) + length - 1) // BLOCK + 1):
                self._fill(out, block, starts, length)
        out *= np.float32(std)
        out += np.float32(mean)
        return out.reshape([stop - start for start, stop in bounds])

    def _draw(self, block: int, num_elements: int) -> NDArray[np.float32]:
        """The first `num_elements` numbers of a block."""
        generator = np.random.Generator(np.random.Philox(key=self._key, counter=[0, 0, 0, block]))
        return generator.standard_normal(num_elements, dtype=np.float32)

    def _fill(self, out: NDArray[np.float32], block: int, starts: NDArray[np.int64], length: int) -> None:
        """Copy into `out`, the runs end to end, what block `block` holds of them."""
        begin, end = block * BLOCK, (block + 1) * BLOCK
        first = int(np.searchsorted(starts, begin - length, side="right"))
        last = int(np.searchsorted(starts, end, side="left")) - 1
        if first > last:
            return  # the box skips this block
        values = self._draw(block, min(end, int(starts[last]) + length) - begin)
        for run in {first, last}:  # these two may reach beyond the block
            start = int(starts[run])
            low, high = max(start, begin), min(start + length, end)
            out[run * length + low - start : run * length + high - start] = values[low - begin : high - begin]
        if last - first > 1:
            inner = starts[first + 1 : last] - begin
            out[(first + 1) * length : last * length] = values[inner[:, None] + np.arange(length)].reshape(-1)


def _bounds(shape: Sequence[int], box: Sequence[slice] | None) -> list[tuple[int, int]]:
    """(start, stop) a dim."""
    if box is None:
        return [(0, size) for size in shape]
    if len(box) != len(shape):
        raise ValueError(f"the box {box} has {len(box)} dims, the shape {list(shape)} has {len(shape)}")
    bounds = []
    for part, size in zip(box, shape, strict=True):
        start = 0 if part.start is None else part.start
        stop = size if part.stop is None else part.stop
        if part.step not in (None, 1) or not 0 <= start <= stop <= size:
            raise ValueError(f"the box {box} does not lie in the shape {list(shape)}")
        bounds.append((start, stop))
    return bounds


def _runs(shape: Sequence[int], bounds: Sequence[tuple[int, int]]) -> tuple[NDArray[np.int64], int]:
    """The box as runs of neighbours in row-major order: where each starts (ascending), and the length of all."""
    cut = len(shape)  # dims from `cut` on are whole, so a run spans them and the last cut dim
    while cut > 0 and bounds[cut - 1] == (0, shape[cut - 1]):
        cut -= 1
    inner = prod(shape[cut:])
    if cut == 0:
        return np.zeros(1, dtype=np.int64), inner
    start, stop = bounds[cut - 1]
    starts = np.zeros(1, dtype=np.int64)
    for size, (low, high) in zip(shape[: cut - 1], bounds[: cut - 1], strict=True):
        starts = (starts[:, None] * size + np.arange(low, high, dtype=np.int64)).reshape(-1)
    return (starts * shape[cut - 1] + start) * inner, (stop - start) * inner
