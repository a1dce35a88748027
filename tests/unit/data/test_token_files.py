"""Token corpora on disk: both formats, what damage is told, the dtype rule."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import struct
from pathlib import Path

import numpy as np
import pytest

from ppfleetx.config.errors import UserError
from ppfleetx.data import CorpusWriter, open_corpus
from ppfleetx.data.token_files import FORMATS, MEGATRON_DTYPES, token_dtype

DOCUMENTS = [[5, 6, 7], [8], [9, 10, 11, 12]]
BOTH = list(FORMATS)


def read_documents(corpus):
    bounds = corpus.boundaries
    return [corpus.read(int(a), int(b - a)).tolist() for a, b in itertools.pairwise(bounds)]


def by_hand_megatron(prefix, code, dtype, documents):
    """A Megatron corpus written from the format's description, not with our writer."""
    flat = np.concatenate([np.array(document, dtype) for document in documents])
    Path(f"{prefix}.bin").write_bytes(flat.tobytes())
    sizes = [len(document) for document in documents]
    pointers = [sum(sizes[:i]) * np.dtype(dtype).itemsize for i in range(len(sizes))]
    count = len(sizes)
    Path(f"{prefix}.idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, code, count, count + 1)
        + struct.pack(f"<{count}i", *sizes)
        + struct.pack(f"<{count}q", *pointers)
        + struct.pack(f"<{count + 1}q", *range(count + 1))
    )


@pytest.mark.parametrize("file_format", BOTH)
def test_written_corpus_is_read_back(tmp_path, write_corpus, file_format):
    corpus = open_corpus(write_corpus(tmp_path / "a", DOCUMENTS, file_format, eos_id=7))
    assert read_documents(corpus) == DOCUMENTS
    assert (corpus.num_documents, corpus.num_tokens, corpus.eos_id, corpus.max_id) == (3, 8, 7, 12)
    assert corpus.boundaries.tolist() == [0, 3, 4, 8]
    assert corpus.boundaries.dtype == np.int64 and corpus.read(0, 8).dtype == np.int64


@pytest.mark.parametrize("code", [1, 2, 3, 4, 5, 8])
def test_megatron_files_of_every_integer_dtype(tmp_path, code):
    by_hand_megatron(tmp_path / "m", code, MEGATRON_DTYPES[code], DOCUMENTS)
    corpus = open_corpus(tmp_path / "m")
    assert read_documents(corpus) == DOCUMENTS
    assert corpus.eos_id is None and corpus.max_id is None


def test_megatron_files_of_floats_are_refused(tmp_path):
    by_hand_megatron(tmp_path / "m", 7, "<f4", DOCUMENTS)
    with pytest.raises(UserError, match="float32; they must be integers"):
        open_corpus(tmp_path / "m")


def test_our_megatron_files_equal_the_description(tmp_path, write_corpus):
    write_corpus(tmp_path / "ours", DOCUMENTS, vocab_size=50257)
    by_hand_megatron(tmp_path / "hand", 8, "<u2", DOCUMENTS)
    for suffix in (".bin", ".idx"):
        assert Path(f"{tmp_path}/ours{suffix}").read_bytes() == Path(f"{tmp_path}/hand{suffix}").read_bytes()


def test_fleetx_files_of_numpy(tmp_path):
    np.save(tmp_path / "f_ids.npy", np.array([5, 6, 7, 8, 9, 10, 11, 12], np.uint16))
    np.savez(tmp_path / "f_idx.npz", lens=np.array([3, 1, 4], np.int32), docs=np.arange(4))
    assert read_documents(open_corpus(tmp_path / "f")) == DOCUMENTS


def test_our_fleetx_files_are_read_by_numpy(tmp_path, write_corpus):
    write_corpus(tmp_path / "f", DOCUMENTS, "fleetx", vocab_size=50257)
    ids = np.load(tmp_path / "f_ids.npy")
    index = np.load(tmp_path / "f_idx.npz")
    assert ids.dtype == np.uint16 and ids.tolist() == [5, 6, 7, 8, 9, 10, 11, 12]
    assert index["lens"].dtype == np.int32 and index["lens"].tolist() == [3, 1, 4]
    assert index["docs"].dtype == np.int64 and index["docs"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("file_format", BOTH)
@pytest.mark.parametrize("vocab_size, itemsize", [(50257, 2), (65534, 2), (65535, 4), (70000, 4)])
def test_c27_ids_survive_and_dtype_follows_vocab_size(tmp_path, write_corpus, file_format, vocab_size, itemsize):
    ids = [i for i in (0, 50256, 65533, 65534, 65535, 65536, 69999) if i < vocab_size]
    corpus = open_corpus(write_corpus(tmp_path / "a", [ids], file_format, vocab_size))
    assert corpus.read(0, len(ids)).tolist() == ids
    assert corpus.num_bytes == itemsize * len(ids)
    assert token_dtype(vocab_size).itemsize == itemsize


@pytest.mark.parametrize("ids", [[-1], [1000], [70000]])
def test_writer_refuses_ids_outside_the_vocabulary(tmp_path, ids):
    with pytest.raises(ValueError, match="do not lie in"), CorpusWriter(tmp_path / "a", "megatron", 1000) as writer:
        writer.append(ids)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("file_format", BOTH)
def test_corpus_is_unreadable_until_it_is_whole(tmp_path, file_format):
    """What a killed run leaves: only files aside, which nobody opens."""
    writer = CorpusWriter(tmp_path / "a", file_format, 1000)
    writer.append([1, 2, 3])
    with pytest.raises(UserError):
        open_corpus(tmp_path)
    writer.finish()
    assert open_corpus(tmp_path).num_tokens == 3
    assert not list(tmp_path.glob("*.tmp-*"))


def test_failed_writer_keeps_the_old_corpus(tmp_path, write_corpus):
    write_corpus(tmp_path / "a", DOCUMENTS)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(KeyError), CorpusWriter(tmp_path / "a", "megatron", 1000, overwrite=True) as writer:
        writer.append([1])
        raise KeyError
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("file_format", BOTH)
@pytest.mark.parametrize("renames", [0, 1, 2])
def test_overwriting_that_stops_between_renames_leaves_no_pair(
    tmp_path, write_corpus, monkeypatch, file_format, renames
):
    write_corpus(tmp_path / "a", DOCUMENTS)
    replace, done = os.replace, []

    def stopping(source, target):
        if len(done) == renames:
            raise KeyboardInterrupt
        done.append(target)
        replace(source, target)

    monkeypatch.setattr(os, "replace", stopping)
    with pytest.raises(KeyboardInterrupt), CorpusWriter(tmp_path / "a", file_format, 1000, overwrite=True) as writer:
        writer.append([1, 2])
    with pytest.raises(UserError):
        open_corpus(tmp_path / "a")


def test_existing_corpus_is_kept_unless_overwrite(tmp_path, write_corpus):
    write_corpus(tmp_path / "a", DOCUMENTS)
    for file_format in BOTH:
        with pytest.raises(UserError, match="an existing corpus is kept"):
            CorpusWriter(tmp_path / "a", file_format, 1000)
    with CorpusWriter(tmp_path / "a", "fleetx", 1000, overwrite=True) as writer:
        writer.append([1, 2])
    assert read_documents(open_corpus(tmp_path)) == [[1, 2]]  # the corpus of the other format is gone


def test_of_two_runs_with_one_prefix_the_first_to_finish_wins(tmp_path, write_corpus):
    slower = CorpusWriter(tmp_path / "a", "megatron", 100)
    with pytest.raises(UserError, match="an existing corpus is kept"), slower:
        slower.append([3])
        write_corpus(tmp_path / "b", [[1, 2]])
        for suffix in (".bin", "_meta.json", ".idx"):
            os.rename(tmp_path / f"b{suffix}", tmp_path / f"a{suffix}")
    assert read_documents(open_corpus(tmp_path)) == [[1, 2]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx", "a_meta.json"]


def test_writing_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="at least one token"), CorpusWriter(tmp_path / "a", "megatron", 1000):
        pass
    assert list(tmp_path.iterdir()) == []


def cut(path, keep):
    path.write_bytes(path.read_bytes()[:keep])


def damage_cases():
    def name(function, *suffixes):
        return [pytest.param(suffix, function, id=f"{function.__name__}{suffix}") for suffix in suffixes]

    def emptied(path):
        path.write_bytes(b"")

    def truncated(path):
        cut(path, path.stat().st_size - 2)

    def only_a_start(path):
        cut(path, 20)

    def web_page(path):
        path.write_bytes(b"<html>404 not found</html>" * 20)

    everything = (".bin", ".idx", "_ids.npy", "_idx.npz")
    return [
        *name(emptied, *everything),
        *name(truncated, *everything),
        *name(only_a_start, ".idx", "_ids.npy", "_idx.npz"),
        *name(web_page, *everything),
    ]


@pytest.mark.parametrize("suffix, damage", damage_cases())
def test_damaged_file_is_named(tmp_path, write_corpus, suffix, damage):
    file_format = "megatron" if suffix in (".bin", ".idx") else "fleetx"
    write_corpus(tmp_path / "a", DOCUMENTS, file_format, sidecar=False)
    damage(tmp_path / f"a{suffix}")
    with pytest.raises(UserError) as caught:
        open_corpus(tmp_path / "a", "Data.Train.dataset.input_dir")
    assert f"a{suffix}" in str(caught.value)
    assert caught.value.problems[0].key == "Data.Train.dataset.input_dir"


@pytest.mark.parametrize("num_tokens", [7, 9])
def test_lengths_that_do_not_add_up_are_told_with_both_numbers(tmp_path, num_tokens):
    np.save(tmp_path / "f_ids.npy", np.arange(num_tokens, dtype=np.uint16))
    np.savez(tmp_path / "f_idx.npz", lens=np.array([3, 1, 4], np.int32), docs=np.arange(4))
    with pytest.raises(UserError, match=rf"has {num_tokens} tokens where f_idx\.npz lists 8"):
        open_corpus(tmp_path / "f")


def test_megatron_pointers_must_be_contiguous(tmp_path, write_corpus):
    write_corpus(tmp_path / "a", DOCUMENTS, sidecar=False)
    index = bytearray((tmp_path / "a.idx").read_bytes())
    struct.pack_into("<q", index, 34 + 3 * 4 + 8, 4)
    (tmp_path / "a.idx").write_bytes(index)
    with pytest.raises(UserError, match="pointers that are not the cumulative sizes"):
        open_corpus(tmp_path / "a")


@pytest.mark.parametrize("offset, value, told", [(9, 2, "version 2"), (17, 9, "dtype code 9")])
def test_megatron_header_is_checked(tmp_path, write_corpus, offset, value, told):
    write_corpus(tmp_path / "a", DOCUMENTS, sidecar=False)
    index = bytearray((tmp_path / "a.idx").read_bytes())
    index[offset] = value
    (tmp_path / "a.idx").write_bytes(index)
    with pytest.raises(UserError, match=told):
        open_corpus(tmp_path / "a")


def test_pickled_ids_are_not_executed(tmp_path):
    np.save(tmp_path / "f_ids.npy", np.array([{}], object), allow_pickle=True)
    np.savez(tmp_path / "f_idx.npz", lens=np.array([1], np.int32), docs=np.arange(2))
    with pytest.raises(UserError, match=r"f_ids\.npy is no readable NumPy array file"):
        open_corpus(tmp_path / "f")


@pytest.mark.parametrize(
    "dtype, lens, told",
    [(np.float32, [3], "one row of integers"), (np.int32, [4, -1], "negative length"), (np.int32, [0], "no tokens")],
)
def test_unusable_fleetx_contents(tmp_path, dtype, lens, told):
    np.save(tmp_path / "f_ids.npy", np.zeros(3, dtype))
    np.savez(tmp_path / "f_idx.npz", lens=np.array(lens, np.int32), docs=np.arange(len(lens) + 1))
    with pytest.raises(UserError, match=told):
        open_corpus(tmp_path / "f")


@pytest.mark.parametrize(
    "file_format, suffixes", [("megatron", (".bin", ".idx")), ("fleetx", ("_ids.npy", "_idx.npz"))]
)
def test_no_damaged_byte_brings_another_error(tmp_path, write_corpus, file_format, suffixes):
    write_corpus(tmp_path / "a", DOCUMENTS, file_format, sidecar=False)
    generator = random.Random(0)
    for suffix in suffixes:
        path = tmp_path / f"a{suffix}"
        content = path.read_bytes()
        for _ in range(400):
            damaged = bytearray(content)
            damaged[generator.randrange(len(content))] = generator.randrange(256)
            path.write_bytes(damaged[: generator.choice([len(content), generator.randrange(len(content))])])
            with contextlib.suppress(UserError):
                open_corpus(tmp_path)
        path.write_bytes(content)
    assert open_corpus(tmp_path).num_tokens == 8
