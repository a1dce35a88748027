"""GPTDataset against a slow oracle, and what it refuses."""

from __future__ import annotations

import logging
import os
import random

import numpy as np
import pytest

from ppfleetx.config.errors import UserError
from ppfleetx.data import DatasetSpec, GPTDataset, SampleOrder
from ppfleetx.data import dataset as dataset_module


def spec_of(input_dir, **changes) -> DatasetSpec:
    fields = {"split": [1, 0, 0], "mode": "Train", "seq_len": 8, "seed": 1024, "vocab_size": 1000}
    return DatasetSpec(input_dir=input_dir, **{**fields, **changes})


def make_documents(count, seed=0):
    generator = random.Random(seed)
    return [[generator.randrange(3, 1000) for _ in range(generator.randrange(1, 30))] + [2] for _ in range(count)]


@pytest.mark.parametrize("mode, first, last", [("Train", 0, 20), ("Eval", 20, 28), ("Test", 28, 40)])
def test_samples_equal_a_list_of_tokens_cut_by_hand(tmp_path, write_corpus, mode, first, last):
    documents = make_documents(40)
    write_corpus(tmp_path / "a", documents[:15], eos_id=2)
    write_corpus(tmp_path / "b", documents[15:], "fleetx", eos_id=2)
    dataset = GPTDataset(spec_of(tmp_path, mode=mode, split=[20, 8, 12]))
    flat = [token for document in documents[first:last] for token in document]
    stream, seq_len, start = flat * 3, 8, 0
    order = SampleOrder(len(flat), seq_len, 1024, mode)
    for epoch in range(3):
        end = ((epoch + 1) * len(flat) - 1) // seq_len
        assert dataset.num_samples(epoch + 1) == end
        seen = []
        for index in range(start, end):
            j = order.stream_index(index)
            expected = stream[j * seq_len : j * seq_len + seq_len + 1]
            ids, labels, mask = dataset[index]
            assert ids.tolist() == expected[:-1] and labels.tolist() == expected[1:]
            assert mask.tolist() == [float(token != 2) for token in expected[:-1]]
            assert dataset.epoch_of(index) == epoch
            seen.append(j)
        assert sorted(seen) == list(range(start, end))
        start = end


def test_b36_loss_mask_is_zero_where_the_input_is_eos(tmp_path, write_corpus):
    write_corpus(tmp_path / "a", [[5, 6, 7, 2], [8, 2], [9, 9, 9]], eos_id=2)
    sample = GPTDataset(spec_of(tmp_path))[0]
    assert sample.ids.tolist() == [5, 6, 7, 2, 8, 2, 9, 9]
    assert sample.labels.tolist() == [6, 7, 2, 8, 2, 9, 9, 9]
    assert sample.loss_mask.tolist() == [1, 1, 1, 0, 1, 0, 1, 1]
    assert [part.dtype for part in sample] == [np.int64, np.int64, np.float32]
    assert GPTDataset(spec_of(tmp_path, eos_id=9))[0].loss_mask.tolist() == [1, 1, 1, 1, 1, 1, 0, 0]


def test_a_split_says_which_documents_of_which_files_it_reads(tmp_path, write_corpus):
    """Documents of 3 tokens, four files of two: 8 documents, cut at 3, 6 and 8."""
    for name in "abcd":
        write_corpus(tmp_path / name, [[5, 6, 2]] * 2)
    told = [
        GPTDataset(spec_of(tmp_path, mode=mode, split=[3, 3, 2], seq_len=2)).describe()
        for mode in ("Train", "Eval", "Test")
    ]
    assert told == [
        f"documents 1 to 3 of 8 (9 tokens) in {tmp_path / 'a'}, {tmp_path / 'b'}",
        f"documents 4 to 6 of 8 (9 tokens) in {tmp_path / 'b'}, {tmp_path / 'c'}",
        f"documents 7 to 8 of 8 (6 tokens) in {tmp_path / 'd'}",
    ]
    whole = GPTDataset(spec_of(tmp_path, seq_len=2))
    assert whole.describe().endswith(f"(24 tokens) in {tmp_path / 'a'}, {tmp_path / 'b'}, {tmp_path / 'c'} and 1 more")
    assert whole.documents == range(8)


def test_no_known_eos_masks_nothing(tmp_path, write_corpus):
    write_corpus(tmp_path / "a", [[0, 2, 3] * 9])
    assert GPTDataset(spec_of(tmp_path))[0].loss_mask.tolist() == [1] * 8


def test_an_eos_other_than_the_tokenizers_is_told(tmp_path, write_corpus, caplog):
    write_corpus(tmp_path / "a", make_documents(9), eos_id=2)
    assert GPTDataset(spec_of(tmp_path, eos_id=2)).eos_id == 2
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert GPTDataset(spec_of(tmp_path, eos_id=5)).eos_id == 5
    assert "Data.Train.dataset.eos_id 5: the tokenizer of this corpus ends documents with id 2" in caplog.text


def test_order_depends_on_seed_mode_and_epoch_only(tmp_path, write_corpus):
    def first_ids(count=30, **changes):
        dataset = GPTDataset(spec_of(tmp_path, **changes))
        return [dataset[i].ids.tolist() for i in range(count)]

    write_corpus(tmp_path / "a", [list(range(3, 283))])
    assert first_ids() == first_ids()
    assert first_ids() != first_ids(seed=1)
    assert first_ids() != first_ids(mode="Eval", split=[0, 1, 0])


def test_negative_index(tmp_path, write_corpus):
    write_corpus(tmp_path / "a", [list(range(20))])
    with pytest.raises(IndexError):
        GPTDataset(spec_of(tmp_path))[-1]


@pytest.mark.parametrize("mode", ["Eval", "Test"])
def test_c22_split_without_documents_is_an_error_at_once(tmp_path, write_corpus, mode):
    write_corpus(tmp_path / "a", make_documents(10))
    split = [969, 30, 1]
    with pytest.raises(UserError) as caught:
        GPTDataset(spec_of(tmp_path, mode=mode, split=split))
    (problem,) = caught.value.problems
    assert problem.key == f"Data.{mode}.dataset.split" and problem.value == split
    assert f"{mode} gets no document" in problem.rule and "10 documents at [0, 10, 10, 10]" in problem.rule
    assert problem.fix == "use the split [8, 1, 1]"
    GPTDataset(spec_of(tmp_path, mode=mode, split=[8, 1, 1], seq_len=1))  # the fix works


def test_unusable_split(tmp_path, write_corpus):
    write_corpus(tmp_path / "a", make_documents(3))
    with pytest.raises(UserError, match=r"Data.Train.dataset.split = \[1, -1, 2\]"):
        GPTDataset(spec_of(tmp_path, split=[1, -1, 2]))


def test_too_few_tokens_for_one_sample(tmp_path, write_corpus):
    write_corpus(tmp_path / "a", [list(range(8))])
    with pytest.raises(UserError, match=r"max_seq_len \+ 1 = 9 tokens; Train has 8"):
        GPTDataset(spec_of(tmp_path))
    assert GPTDataset(spec_of(tmp_path, seq_len=7)).num_samples() == 1


@pytest.mark.parametrize("sidecar", [True, False])
def test_ids_beyond_the_vocabulary_are_found_at_start(tmp_path, write_corpus, sidecar):
    write_corpus(tmp_path / "a", [[1, 2, 3] * 5, [700] * 20], sidecar=sidecar)
    with pytest.raises(UserError, match=r"Model.vocab_size = 700\); the corpus holds id 700") as caught:
        GPTDataset(spec_of(tmp_path, vocab_size=700))
    assert caught.value.problems[0].fix == "set Model.vocab_size to at least 701"
    GPTDataset(spec_of(tmp_path, vocab_size=701))


def test_negative_ids_are_found(tmp_path):
    np.save(tmp_path / "f_ids.npy", np.array([1] * 20 + [-5], np.int32))
    np.savez(tmp_path / "f_idx.npz", lens=np.array([21], np.int32), docs=np.arange(2))
    with pytest.raises(UserError, match="the corpus holds id -5"):
        GPTDataset(spec_of(tmp_path))


def test_large_corpora_without_sidecar_are_checked_sample_by_sample(tmp_path, write_corpus, monkeypatch):
    monkeypatch.setattr(dataset_module, "_SCAN_LIMIT_BYTES", 10)
    write_corpus(tmp_path / "a", [[1] * 40 + [700]], sidecar=False)
    dataset = GPTDataset(spec_of(tmp_path, vocab_size=700))
    results = []
    for index in range(dataset.num_samples()):
        try:
            results.append(dataset[index].ids.size)
        except UserError as error:
            results.append(str(error))
    bad = [result for result in results if result != 8]
    assert len(bad) == 1 and "the corpus holds id 700" in bad[0]


def test_c33_nothing_is_written_beside_the_data(tmp_path, write_corpus):
    folder = tmp_path / "data"
    write_corpus(folder / "a", make_documents(20))
    folder.chmod(0o555)  # root may write all the same, so files and times are compared as well
    try:
        before = (sorted(os.listdir(folder)), folder.stat().st_mtime_ns)
        dataset = GPTDataset(spec_of(folder))
        for index in range(dataset.num_samples(2)):
            dataset[index]
        assert (sorted(os.listdir(folder)), folder.stat().st_mtime_ns) == before
    finally:
        folder.chmod(0o755)
