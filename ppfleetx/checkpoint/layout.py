"""What a rank holds of a parameter, and the tensors that files hold of it.

Files know neither vocabulary padding nor fused query/key/value: padding rows are left out, and the matrices of an interleaved
parameter are stored one by one under their own names, so that a run may read what another wrote with other settings.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ppfleetx.checkpoint.regions import Box, Region, first_rows
from ppfleetx.layers.spec import ParameterSpec


class Part(NamedTuple):
    """A region of a tensor in the files, which has the name `name` and, as a whole, the shape `shape`."""

    name: str
    shape: tuple[int, ...]
    region: Region


def stored_shapes(spec: ParameterSpec) -> dict[str, tuple[int, ...]]:
    """The tensors that files hold of a parameter: name to global shape."""
    rows, *rest = spec.shape
    shape = (rows if spec.rows is None else spec.rows, *rest)
    if not spec.parts:
        return {spec.name: shape}
    assert spec.rows is None, f"{spec.name}: an interleaved parameter has no padding rows"
    columns = [spec.groups * width for width in spec.part_widths]
    return {name: (*shape[:-1], size) for name, size in zip(spec.parts, columns, strict=True)}


class PieceLayout:
    """How the memory of a rank's piece maps to memories of its parts.

    An interleaved piece holds whole groups, so in row-major order it is a sequence of periods, one for each row and group, in
    which some elements of every part follow one another. A run of it therefore holds a *run* of each part: the order within one
    part is the same.

    Args:
        spec: the parameter.
        box, flat: the piece's, padding included.

    Attributes:
        size: elements of the piece, padding left out; they come first in its memory.
        parts: where they are in the files, in the order of `split` and `join`.
    """

    def __init__(self, spec: ParameterSpec, box: Box, flat: tuple[int, int] | None):
        region = Region(box, flat)
        if spec.rows is not None:
            region = first_rows(region, spec.rows)
        self.size = region.size
        self._run = region.run
        self._widths = spec.part_widths
        self._offsets = [0, *itertools.accumulate(self._widths)]  # of each part in a period
        self._period = self._offsets[-1]
        assert len(self._widths) == 1 or all(edge % self._period == 0 for edge in box[-1]), f"{spec.name}: {box}"
        self.parts = [
            Part(name, shape, self._region(number, region))
            for number, (name, shape) in enumerate(stored_shapes(spec).items())
        ]

    def split(self, memory: np.ndarray) -> list[np.ndarray]:
        """The piece's memory (padding may follow) → that of each part."""
        memory = memory[: self.size]
        if len(self._widths) == 1:
            return [memory]
        periods = self._covering(memory, self._run, self._period).reshape(-1, self._period)
        parts = []
        for number, width in enumerate(self._widths):
            part = np.ascontiguousarray(periods[:, self._columns(number)]).reshape(-1)
            parts.append(part[self._within(self._part_run(number), width)])
        return parts

    def join(self, memories: Sequence[np.ndarray]) -> np.ndarray:
        """The memory of each part → the piece's, padding left out."""
        if len(self._widths) == 1:
            return memories[0]
        periods = np.empty((self._periods, self._period), memories[0].dtype)
        for number, (memory, width) in enumerate(zip(memories, self._widths, strict=True)):
            part = self._covering(memory, self._part_run(number), width)
            periods[:, self._columns(number)] = part.reshape(-1, width)
        return periods.reshape(-1)[self._within(self._run, self._period)]

    @property
    def _periods(self) -> int:
        """Periods that the run touches."""
        start, stop = self._run
        return -(-stop // self._period) - start // self._period

    def _region(self, number: int, region: Region) -> Region:
        """The region of part `number` that this region of the piece holds."""
        if len(self._widths) == 1:
            return region
        *front, last = region.box
        start, stop = (edge // self._period * self._widths[number] for edge in last)
        box = (*front, (start, stop))
        return Region(box, None if region.flat is None else self._part_run(number))

    def _part_run(self, number: int) -> tuple[int, int]:
        """The run of part `number`: how many of its elements come before each end of the piece's run."""
        before = []
        for position in self._run:
            periods, rest = divmod(position, self._period)
            width = self._widths[number]
            before.append(periods * width + min(max(rest - self._offsets[number], 0), width))
        return before[0], before[1]

    def _columns(self, number: int) -> slice:
        """Where part `number` lies in a period."""
        return slice(self._offsets[number], self._offsets[number + 1])

    def _covering(self, memory: np.ndarray, run: tuple[int, int], period: int) -> np.ndarray:
        """The memory of a run, extended (by anything) to the whole periods that it touches."""
        if memory.size == self._periods * period:
            return memory
        covering = np.empty(self._periods * period, memory.dtype)
        covering[self._within(run, period)] = memory
        return covering

    def _within(self, run: tuple[int, int], period: int) -> slice:
        """Where a run lies in the touched periods, which hold `period` of its elements each."""
        first = self._run[0] // self._period * period
        return slice(run[0] - first, run[1] - first)


def padded_memory(memory: np.ndarray, box: Box, flat: tuple[int, int] | None) -> np.ndarray:
    """The memory of a piece whose padding, which comes last, is zero."""
    size = Region(box, flat).size
    if memory.size == size:
        return memory
    full = np.zeros(size, memory.dtype)
    full[: memory.size] = memory
    return full
