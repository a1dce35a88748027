"""Random ways to hold a parameter on several ranks, and what they hold, for property tests."""

from __future__ import annotations

import itertools
from math import prod
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from ppfleetx.checkpoint.regions import Box, lengths
from ppfleetx.layers.spec import ParameterSpec


class Cut(NamedTuple):
    """A parameter as one run holds it: its spec there, and (box, flat) of each piece, in any order."""

    spec: ParameterSpec
    pieces: list[tuple[Box, tuple[int, int] | None]]


def memory_of(values: np.ndarray, box: Box, flat: tuple[int, int] | None) -> np.ndarray:
    """What a rank holds of a padded global array: the oracle."""
    part = values[tuple(slice(start, stop) for start, stop in box)].reshape(-1)
    return part if flat is None else part[slice(*flat)]


@st.composite
def boxes(draw, shape: tuple[int, ...], unit: int = 1) -> list[Box]:
    """The whole of a tensor, cut along one dim (the last one only at multiples of `unit`)."""
    dim = draw(st.integers(0, len(shape) - 1))
    step = unit if dim == len(shape) - 1 else 1
    inner = draw(st.lists(st.integers(0, shape[dim] // step), max_size=3))
    edges = sorted({0, shape[dim], *(edge * step for edge in inner)})
    full = [(0, length) for length in shape]
    return [(*full[:dim], edge, *full[dim + 1 :]) for edge in itertools.pairwise(edges)]


@st.composite
def runs(draw, box: Box) -> list[tuple[int, int] | None]:
    """A box as it is, or cut into runs, some of them empty."""
    if draw(st.booleans()):
        return [None]
    size = prod(lengths(box))
    edges = sorted([0, size, *draw(st.lists(st.integers(0, size), max_size=4))])
    return list(itertools.pairwise(edges))


@st.composite
def cut(draw, spec: ParameterSpec) -> Cut:
    """A parameter held in pieces."""
    unit = spec.shape[-1] // spec.groups if spec.parts else 1
    pieces = [(box, flat) for box in draw(boxes(spec.shape, unit)) for flat in draw(runs(box))]
    return Cut(spec, draw(st.permutations(pieces)))
