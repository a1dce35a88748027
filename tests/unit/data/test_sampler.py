"""Batches of ranks against the global order."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppfleetx.data import GlobalBatchSampler


def ranks(global_batch_size, data_size, num_samples, drop_last):
    return [GlobalBatchSampler(global_batch_size, r, data_size, num_samples, drop_last) for r in range(data_size)]


def test_ranks_take_contiguous_slices():
    first, second = ranks(8, 2, None, True)
    assert first.batch_at(0).tolist() == [0, 1, 2, 3] and second.batch_at(0).tolist() == [4, 5, 6, 7]
    assert first.batch_at(16).tolist() == [16, 17, 18, 19] and second.batch_at(16).tolist() == [20, 21, 22, 23]


def test_c36_last_partial_batch_is_spread_not_repeated():
    first, second = ranks(8, 2, 10, drop_last=False)
    assert len(first) == 2
    assert first.batch_at(8).tolist() == [8, -1, -1, -1]
    assert second.batch_at(8).tolist() == [9, -1, -1, -1]


def test_c36_drop_last():
    first, second = ranks(8, 2, 10, drop_last=True)
    assert len(first) == len(second) == 1
    assert list(first.positions()) == [0]
    with pytest.raises(IndexError, match="no batch after 8 of 10"):
        second.batch_at(8)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 60), st.integers(0, 60), st.booleans())
def test_every_sample_exactly_once(local, data_size, num_samples, consumed, drop_last):
    size = local * data_size
    samplers = ranks(size, data_size, num_samples, drop_last)
    seen = []
    for position in samplers[0].positions(consumed):
        parts = [sampler.batch_at(position) for sampler in samplers]
        assert all(part.size == local for part in parts)
        real = [int((part >= 0).sum()) for part in parts]
        assert max(real) - min(real) <= 1
        seen += [i for part in parts for i in part.tolist() if i >= 0]
    left = max(0, num_samples - consumed)
    used = left // size * size if drop_last else left
    assert seen == list(range(consumed, consumed + used))
    if consumed == 0:
        assert len(samplers[0]) == len(list(samplers[0].positions()))


def test_a_new_batch_size_goes_on_at_the_same_sample():
    """Three batches of 8, then batches of 6: the position is 24 samples, which 6 need not divide."""
    sampler = GlobalBatchSampler(6, 0, 1, None, True)
    assert list(itertools.islice(sampler.positions(8), 3)) == [8, 14, 20]
    assert sampler.batch_at(8).tolist() == [8, 9, 10, 11, 12, 13]


def test_endless_sampler_has_no_length():
    with pytest.raises(TypeError):
        len(GlobalBatchSampler(2, 0, 1, None, False))
    assert GlobalBatchSampler(2, 0, 1, None, False).has_batch(10**15)


@pytest.mark.parametrize("size, rank, data_size", [(6, 0, 4), (0, 0, 1), (4, 4, 4), (4, -1, 4)])
def test_bad_sizes(size, rank, data_size):
    with pytest.raises(ValueError):
        GlobalBatchSampler(size, rank, data_size, None, True)
