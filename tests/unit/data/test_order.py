"""The order of samples against brute force."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppfleetx.data import KeyedPermutation, SampleOrder, split_documents

checked = settings(max_examples=100, derandomize=True, deadline=None)


@pytest.mark.parametrize(
    "num_documents, split, ends",
    [
        (1000, [969, 30, 1], [0, 969, 999, 1000]),
        (100, [969, 30, 1], [0, 97, 100, 100]),
        (10, [969, 30, 1], [0, 10, 10, 10]),
        (34, [949, 50, 1], [0, 32, 34, 34]),
        (3, [0, 1, 1], [0, 0, 1, 3]),  # the rule alone gives [0, -1, 1, 3]
        (7, [1, 0, 0], [0, 7, 7, 7]),
        (4, [0.5, 0.25, 0.25], [0, 2, 3, 4]),
    ],
)
def test_b34_split(num_documents, split, ends):
    assert split_documents(num_documents, split) == ends


@checked
@given(st.integers(0, 10**7), st.lists(st.floats(0, 1e6), min_size=3, max_size=3).filter(lambda s: sum(s) > 0))
def test_split_covers_all_documents(num_documents, split):
    ends = split_documents(num_documents, split)
    assert ends[0] == 0 and ends[3] == num_documents and ends == sorted(ends)


@pytest.mark.parametrize("split", [[0, 0, 0], [1, 2], [1, -1, 3], [float("nan"), 1, 1], [float("inf"), 1, 1]])
def test_bad_split(split):
    with pytest.raises(ValueError, match="three numbers"):
        split_documents(10, split)


def test_permutation_is_a_bijection_for_every_small_n():
    for n in range(1, 301):
        permutation = KeyedPermutation(n, 1234, "Train", 0)
        image = permutation.take(np.arange(n))
        assert sorted(image.tolist()) == list(range(n))
        assert [permutation.at(i) for i in range(n)] == image.tolist()


@settings(max_examples=15, derandomize=True, deadline=None)
@given(st.integers(301, 300_000), st.integers(-(2**63), 2**63))
def test_permutation_is_a_bijection_for_larger_n(n, seed):
    image = KeyedPermutation(n, seed, "x", 3).take(np.arange(n))
    assert np.array_equal(np.sort(image), np.arange(n))


@checked
@given(st.integers(2**40, 2**62), st.integers(0, 2**39))
def test_permutation_of_a_huge_n_stays_inside_and_distinct(n, start):
    permutation = KeyedPermutation(n, 0, "x", 0)
    image = permutation.take(np.arange(start, start + 50))
    assert len(set(image.tolist())) == 50 and image.min() >= 0 and image.max() < n
    assert permutation.at(start) == image[0]


def test_every_part_of_the_key_matters():
    keys = [(0, "a", 0), (1, "a", 0), (0, "b", 0), (0, "a", 1), (-1, "a", 0), (10, "a", 0), (1, "0a", 0)]
    images = {tuple(KeyedPermutation(100, *key).take(np.arange(100)).tolist()) for key in keys}
    assert len(images) == len(keys)


def test_permutation_spreads_evenly():
    """Over many keys every item comes to every place about equally often (chi-square, 4 sigma)."""
    for n in (2, 3, 5, 16, 50):
        counts = np.zeros((n, n))
        keys = 2000
        for seed in range(keys):
            counts[np.arange(n), KeyedPermutation(n, seed, "x", 0).take(np.arange(n))] += 1
        expected, freedom = keys / n, (n - 1) ** 2
        assert ((counts - expected) ** 2 / expected).sum() < freedom + 4 * (2 * freedom) ** 0.5 + 4


def test_golden_order():
    """These numbers are the data order of every run there is: a change breaks resuming."""
    small = [15, 6, 16, 7, 10, 9, 2, 0, 11, 14, 5, 19, 12, 1, 13, 17, 18, 8, 3, 4]
    assert KeyedPermutation(20, 1024, "Train", 0).take(np.arange(20)).tolist() == small
    big = KeyedPermutation(10**12, 1024, "Train", 1)
    assert [big.at(i) for i in range(3)] == [605059290437, 509593310561, 126371770562]


@pytest.mark.parametrize("index", [-1, 5])
def test_permutation_outside_its_domain(index):
    with pytest.raises(IndexError):
        KeyedPermutation(5, 0, "x", 0).at(index)


def test_b35_samples_of_epochs():
    order = SampleOrder(1000, 64, 0, "Train")
    assert [order.num_samples(e) for e in range(3)] == [0, 15, 31]
    assert [order.epoch_of(i) for i in (0, 14, 15, 30, 31)] == [0, 0, 1, 1, 2]


@checked
@given(st.integers(1, 40), st.integers(1, 200), st.integers(0, 1000))
def test_order_against_a_list(seq_len, extra, seed):
    """A slow oracle: lay the tokens end to end, cut samples, count how many fit in each epoch."""
    num_tokens, epochs = seq_len + extra, 4
    order = SampleOrder(num_tokens, seq_len, seed, "Train")
    expected_ends = []
    for epoch in range(1, epochs + 1):
        count = 0
        while count * seq_len + seq_len + 1 <= epoch * num_tokens:
            count += 1
        expected_ends.append(count)
    first = 0
    for epoch, end in enumerate(expected_ends):
        assert order.num_samples(epoch + 1) == end and end > first
        assert [order.epoch_of(i) for i in range(first, end)] == [epoch] * (end - first)
        assert sorted(order.stream_index(i) for i in range(first, end)) == list(range(first, end))
        first = end


def test_too_few_tokens():
    with pytest.raises(ValueError, match="no sample"):
        SampleOrder(64, 64, 0, "x")
