"""Parts of a tensor (of at least one dim), and copying what two of them have in common.

A *box* is (start, stop) of each dim. A *region* is a box, or a run of it: the elements [a, b) of the box in row-major order.
Its *memory* is its elements end to end, a 1-D array in row-major order of the box. Numbers only; imports no Paddle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

Box = tuple[tuple[int, int], ...]
#: a box and where its elements begin in some region's memory
Block = tuple[Box, int]


class Region(NamedTuple):
    """A part of a tensor.

    Attributes:
        box: (start, stop) of each dim of the tensor.
        flat: (start, stop) within the box in row-major order; None: all of it.
    """

    box: Box
    flat: tuple[int, int] | None = None

    @property
    def run(self) -> tuple[int, int]:
        """`flat`, or all of the box."""
        return self.flat or (0, prod(lengths(self.box)))

    @property
    def size(self) -> int:
        """Number of elements."""
        start, stop = self.run
        return stop - start

    @property
    def has_origin(self) -> bool:
        """Whether the tensor's first element is in it: true of one of the regions that a tensor is cut into."""
        return self.size > 0 and self.run[0] == 0 and all(start == 0 for start, _ in self.box)


def whole(shape: Sequence[int]) -> Region:
    """All of a tensor."""
    return Region(tuple((0, length) for length in shape))


def lengths(box: Box) -> tuple[int, ...]:
    """The shape of a box."""
    return tuple(stop - start for start, stop in box)


def first_rows(region: Region, rows: int) -> Region:
    """The part of a region that lies in the tensor's first `rows` rows; its memory begins like the region's."""
    start, stop = region.box[0]
    clipped = Region(((min(start, rows), min(stop, rows)), *region.box[1:]))
    if region.flat is None:
        return clipped
    return clipped._replace(flat=(min(region.flat[0], clipped.size), min(region.flat[1], clipped.size)))


def copy_common(source: np.ndarray, source_region: Region, target: np.ndarray, target_region: Region) -> int:
    """Copies the elements that are in both regions of one tensor from one memory to the other; returns their number."""
    count = 0
    for source_block, target_block, box in _common(source_region, target_region):
        part = _view(target, *target_block, box)
        part[...] = _view(source, *source_block, box)
        count += part.size
    return count


def touch(a: Region, b: Region) -> bool:
    """Whether two regions of one tensor have an element in common."""
    return next(_common(a, b), None) is not None


def _common(a: Region, b: Region) -> Iterator[tuple[Block, Block, Box]]:
    """The boxes that two regions have in common, each with the block of either region that it lies in."""
    for a_block in _blocks(a):
        for b_block in _blocks(b):
            pairs = zip(a_block[0], b_block[0], strict=True)
            box = tuple((max(p[0], q[0]), min(p[1], q[1])) for p, q in pairs)
            if all(start < stop for start, stop in box):
                yield a_block, b_block, box


def _blocks(region: Region) -> Iterator[Block]:
    """Boxes that make up a region, each contiguous in the region's memory.

    A box is one; a run of an n-dimensional box is at most 2n - 1.
    """
    if region.flat is None:
        yield region.box, 0
        return
    offset = 0
    for local in _run(lengths(region.box), *region.flat):
        yield tuple((start + a, start + b) for (start, _), (a, b) in zip(region.box, local, strict=True)), offset
        offset += prod(lengths(local))


def _run(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Boxes that make up the elements [start, stop) of an array of this shape, in order: the end of a row, whole rows, the
    beginning of a row."""
    if start >= stop:
        return
    if len(shape) == 1:
        yield ((start, stop),)
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if start % row:
        end = min(stop, first * row)
        yield from _in_row(shape, first - 1, start, end)
    if first < last:
        yield ((first, last), *((0, length) for length in shape[1:]))
    if stop % row and last >= first:
        yield from _in_row(shape, last, last * row, stop)


def _in_row(shape: tuple[int, ...], index: int, start: int, stop: int) -> Iterator[Box]:
    """`_run` of elements that all lie in row `index`."""
    first = index * prod(shape[1:])
    for rest in _run(shape[1:], start - first, stop - first):
        yield ((index, index + 1), *rest)


def _view(memory: np.ndarray, box: Box, offset: int, part: Box) -> np.ndarray:
    """The elements of `part` (inside `box`) where `box` lies in `memory` from `offset` on."""
    shape = lengths(box)
    block = memory[offset : offset + prod(shape)].reshape(shape)
    return block[tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(part, box, strict=True))]
