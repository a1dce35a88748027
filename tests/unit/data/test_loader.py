"""load_batches: same batches for every number of workers, errors, ends."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ppfleetx.data import DatasetSpec, GlobalBatchSampler, GPTDataset, load_batches
from ppfleetx.data.prefetch import ordered_map

SEQ_LEN = 8


@pytest.fixture
def dataset(tmp_path, write_corpus) -> GPTDataset:
    """64 samples an epoch; every token tells its place."""
    write_corpus(tmp_path / "a", [list(range(64 * SEQ_LEN + 1))])
    spec = DatasetSpec(tmp_path, [1, 0, 0], "Train", SEQ_LEN, seed=3, vocab_size=1000)
    assert GPTDataset(spec).num_samples() == 64
    return GPTDataset(spec)


def data_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("ppfleetx-data")]


def test_c34_one_epoch_is_the_same_for_all_ranks_and_workers(dataset):
    orders, first_tokens = set(), set()
    for data_size, num_workers in itertools.product((1, 2, 4), (0, 1, 2)):
        streams = [
            load_batches(dataset, GlobalBatchSampler(8, rank, data_size, 64, True), num_workers=num_workers)
            for rank in range(data_size)
        ]
        steps = list(zip(*streams, strict=True))
        assert len(steps) == 8
        orders.add(tuple(i for step in steps for batch in step for i in batch.sample_ids.tolist()))
        first_tokens.add(tuple(i for step in steps for batch in step for i in batch.ids[:, 0].tolist()))
    assert orders == {tuple(range(64))}
    assert len(first_tokens) == 1 and sorted(first_tokens.pop()) == list(range(0, 64 * SEQ_LEN, SEQ_LEN))
    assert not data_threads()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_hold_the_samples(dataset, num_workers):
    sampler = GlobalBatchSampler(6, 1, 2, None, True)
    stream = load_batches(dataset, sampler, consumed=50, num_workers=num_workers)
    for position in (50, 56, 62, 68):
        batch = next(stream)
        assert batch.sample_ids.tolist() == [position + 3, position + 4, position + 5]
        assert batch.epoch == (position >= 64)
        for row, index in enumerate(batch.sample_ids.tolist()):
            for got, expected in zip((batch.ids, batch.labels, batch.loss_mask), dataset[index], strict=True):
                assert np.array_equal(got[row], expected) and got.dtype == expected.dtype
    stream.close()
    assert not data_threads()


def test_c36_padding_rows_count_for_nothing(dataset):
    sampler = GlobalBatchSampler(8, 0, 2, 10, drop_last=False)
    *_, last = load_batches(dataset, sampler, num_workers=1)
    assert last.sample_ids.tolist() == [8, -1, -1, -1]
    assert last.loss_mask[0].sum() == SEQ_LEN and last.loss_mask[1:].sum() == 0
    assert last.ids[1:].sum() == 0 and last.labels[1:].sum() == 0


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_an_error_surfaces_unchanged_at_its_batch(dataset, num_workers):
    error = KeyError("sample 10")

    class Failing(GPTDataset):
        def __getitem__(self, index):
            if index == 10:
                raise error
            return super().__getitem__(index)

    stream = load_batches(Failing(dataset.spec), GlobalBatchSampler(4, 0, 1, None, True), num_workers=num_workers)
    assert [next(stream).sample_ids[0] for _ in range(2)] == [0, 4]
    with pytest.raises(KeyError) as caught:
        next(stream)
    assert caught.value is error
    assert not data_threads()


def test_reading_ahead_is_bounded_and_ordered():
    taken = []
    items = (taken.append(i) or i for i in itertools.count())
    stream = ordered_map(ThreadPoolExecutor(2), lambda i: i * i, items, ahead=4)
    for number in range(10):
        assert next(stream) == number**2
        assert len(taken) == number + 5
    stream.close()
