"""Documents in random order: the right order, whatever the memory; bounded memory; nothing left behind."""

from __future__ import annotations

import itertools
import random
import tempfile
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppfleetx.config.errors import UserError
from ppfleetx.data import shuffle
from ppfleetx.data.shuffle import DocumentShuffler


def shuffled(documents, seed, folder, memory_bytes=None, batch=3, dtype="<u2"):
    """The documents as they come out, given in `batch` at a time."""
    out = []
    with DocumentShuffler(seed, np.dtype(dtype), folder, memory_bytes) as shuffler:
        for start in range(0, len(documents), batch):
            some = documents[start : start + batch]
            lengths = np.array([len(document) for document in some], np.int32)
            shuffler.append_batch(np.array([token for document in some for token in document], np.int32), lengths)
        for ids, lengths in shuffler.drain():
            ends = [0, *np.cumsum(lengths).tolist()]
            assert ends[-1] == ids.size and lengths.dtype == np.int32
            out += [ids[a:b].tolist() for a, b in itertools.pairwise(ends)]
    return out


def oracle(documents, seed):
    """Sorted by the numbers of a Philox stream whose key is the seed, one a document."""
    numbers = np.random.Philox(key=seed).random_raw(len(documents)).tolist()
    return [documents[i] for i in sorted(range(len(documents)), key=lambda i: (numbers[i], i))]


def make_documents(count, seed=0):
    generator = random.Random(seed)
    return [[number, *generator.choices(range(60_000), k=generator.randrange(0, 9))] for number in range(count)]


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    count=st.integers(0, 60),
    seed=st.integers(0, (1 << 63) - 1),
    memory_bytes=st.one_of(st.integers(1, 200), st.none()),
    batch=st.integers(1, 20),
    dtype=st.sampled_from(["<u2", "<i4"]),
)
def test_the_order_is_the_oracles_whatever_memory_and_batches(
    tmp_path_factory, count, seed, memory_bytes, batch, dtype
):
    documents = make_documents(count, seed)
    out = shuffled(documents, seed, tmp_path_factory.getbasetemp(), memory_bytes, batch, dtype)
    assert out == oracle(documents, seed)


def test_batches_of_many_tokens_are_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(shuffle, "_BATCH_TOKENS", 7)
    documents = make_documents(500)
    for memory_bytes in (None, 64):
        assert shuffled(documents, 3, tmp_path, memory_bytes) == oracle(documents, 3)


def test_documents_with_one_key_stay_as_they_came_and_together(tmp_path, monkeypatch):
    """All keys equal: no cut of the keys parts them, so they come out although they do not fit into memory."""
    documents = make_documents(20)
    with DocumentShuffler(1, np.dtype("<u2"), tmp_path, 8) as shuffler:
        monkeypatch.setattr(shuffler, "_draw", lambda count: np.full(count, 5, np.uint64))
        for document in documents:
            shuffler.append_batch(np.array(document), np.array([len(document)], np.int32))
        ids = np.concatenate([ids for ids, _ in shuffler.drain()])
    assert ids.tolist() == [token for document in documents for token in document]


def test_every_order_is_as_likely(tmp_path):
    """3! = 6 orders over 3000 seeds: 500 each, standard deviation sqrt(3000 · 1/6 · 5/6) = 20.4; five of them are 102."""
    orders = Counter(tuple(token for (token,) in shuffled([[0], [1], [2]], seed, tmp_path, 64)) for seed in range(3000))
    assert len(orders) == 6 and all(398 <= count <= 602 for count in orders.values())


def test_memory_is_bounded(tmp_path):
    """64 MiB of ids with 4 MiB of memory: 4 MiB while they come in, 4 when they go out, and about 2 a batch of a million."""
    lengths = np.full(64, 8192, np.int32)  # 512 Ki tokens, 1 MiB
    ids = np.arange(lengths.sum()) % 50_000
    tracemalloc.start()
    total = 0
    with DocumentShuffler(1, np.dtype("<u2"), tmp_path, 4 << 20) as shuffler:
        for _ in range(64):
            shuffler.append_batch(ids, lengths)
        for part, _ in shuffler.drain():
            total += part.size
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total == 64 * ids.size
    assert peak < 12 << 20


def test_the_file_has_no_name_and_takes_each_token_once(tmp_path):
    documents = make_documents(200)
    with DocumentShuffler(1, np.dtype("<u2"), tmp_path, 100) as shuffler:
        for document in documents:
            shuffler.append_batch(np.array(document), np.array([len(document)], np.int32))
        list(shuffler.drain())
        assert list(tmp_path.iterdir()) == []  # so whatever ends the process, nothing is left
        assert shuffler._file.seek(0, 2) == 2 * sum(map(len, documents))


def test_a_full_disk_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda *_, dir: open("/dev/full", "w+b", 0))  # noqa: SIM115
    told = ("--output-prefix", "out/c")
    with (
        pytest.raises(UserError, match=r"--shuffle needs a temporary file in .*No space left") as caught,
        DocumentShuffler(1, np.dtype("<u2"), tmp_path, 4, told) as shuffler,
    ):
        for _ in range(3):
            shuffler.append_batch(np.array([1, 2]), np.array([2], np.int32))
    assert (caught.value.problems[0].key, caught.value.problems[0].value) == told


@pytest.mark.parametrize("seed", [-1, 1 << 63])
def test_seeds_that_are_none(tmp_path, seed):
    with pytest.raises(UserError, match="a seed is a whole number from 0 to 9223372036854775807") as caught:
        DocumentShuffler(seed, np.dtype("<u2"), tmp_path)
    assert (caught.value.problems[0].key, caught.value.problems[0].value) == ("--shuffle", seed)
