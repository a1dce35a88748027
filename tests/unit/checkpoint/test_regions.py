"""Overlap arithmetic against NumPy arrays of element numbers."""

from __future__ import annotations

from math import prod

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ppfleetx.checkpoint.regions import Region, copy_common, first_rows, touch
from tests.unit.checkpoint.cuts import boxes, memory_of, runs

SHAPES = st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple)


@st.composite
def two_cuts(draw):
    """(shape, regions of the writer, regions of the reader), each a cut of all of the tensor."""
    shape = draw(SHAPES)
    cuts = [[Region(box, flat) for box in draw(boxes(shape)) for flat in draw(runs(box))] for _ in range(2)]
    return shape, *cuts


@given(two_cuts())
@settings(derandomize=True, deadline=None, max_examples=400)
def test_every_element_lands_once_and_right(case):
    shape, written, read = case
    numbers = np.arange(prod(shape)).reshape(shape)
    for target in read:
        memory = np.full(target.size, -1)
        copied = 0
        for source in written:
            memory_there = memory_of(numbers, *source)
            count = copy_common(memory_there, source, memory, target)
            assert (
                touch(source, target) == (count > 0) == bool(np.isin(memory_there, memory_of(numbers, *target)).any())
            )
            copied += count
        assert copied == target.size
        assert np.array_equal(memory, memory_of(numbers, *target))


@given(two_cuts())
@settings(derandomize=True, deadline=None, max_examples=100)
def test_the_first_element_is_in_one_region_of_a_cut(case):
    _, written, read = case
    assert [sum(region.has_origin for region in cut) for cut in (written, read)] == [1, 1]


@given(two_cuts(), st.integers(0, 7))
@settings(derandomize=True, deadline=None, max_examples=200)
def test_first_rows_are_a_prefix_of_the_memory(case, rows):
    """With them, all elements below `rows` and no other, in a region of the tensor that has only these rows."""
    shape, regions, _ = case
    rows = min(rows, shape[0])
    numbers = np.arange(prod(shape)).reshape(shape)
    found = []
    for region in regions:
        clipped = first_rows(region, rows)
        memory = memory_of(numbers, *region)[: clipped.size]
        assert np.array_equal(memory, memory_of(numbers[:rows], *clipped))
        found += memory.tolist()
    assert sorted(found) == list(range(rows * prod(shape[1:])))
