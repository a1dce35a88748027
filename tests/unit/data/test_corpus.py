"""Finding and joining corpora."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from ppfleetx.config.errors import UserError
from ppfleetx.data import open_corpus

KEY = "Data.Eval.dataset.input_dir"


def test_c25_a_folder_means_all_its_corpora_and_a_prefix_one(tmp_path, write_corpus, caplog):
    write_corpus(tmp_path / "b", [[4, 5], [6]], "fleetx")
    write_corpus(tmp_path / "a", [[1, 2, 3]], "fleetx")
    write_corpus(tmp_path / "c", [[7], [8, 9]], "megatron")
    with caplog.at_level(logging.INFO, "ppfleetx"):
        both = open_corpus(tmp_path, KEY)
    assert both.read(0, 9).tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert both.boundaries.tolist() == [0, 3, 5, 6, 7, 9]
    assert [str(tmp_path / name) in caplog.text for name in "abc"] == [True] * 3
    assert open_corpus(str(tmp_path / "b"), KEY).read(0, 3).tolist() == [4, 5, 6]
    assert open_corpus(tmp_path / "b_ids.npy", KEY).num_tokens == 3


def test_a_list_is_read_in_its_order(tmp_path, write_corpus):
    for name, token in (("a", 1), ("b", 2)):
        write_corpus(tmp_path / name / "x", [[token]])
    corpus = open_corpus([str(tmp_path / "b"), str(tmp_path / "a" / "x")], KEY)
    assert corpus.read(0, 2).tolist() == [2, 1]


def test_reading_spans_files(tmp_path, write_corpus):
    flat, start = np.arange(60), 0
    for number, length in enumerate((1, 20, 4, 35)):
        write_corpus(tmp_path / f"{number}", [flat[start : start + length].tolist()])
        start += length
    corpus = open_corpus(tmp_path)
    for first in range(60):
        for length in range(61 - first):
            assert corpus.read(first, length).tolist() == list(range(first, first + length))
    for first, length in ((-1, 2), (59, 2), (61, 0)):
        with pytest.raises(IndexError):
            corpus.read(first, length)
    assert corpus.scan_ids() == (0, 59)


def test_index_maps_and_other_files_of_upstream_are_passed_over(tmp_path, write_corpus):
    write_corpus(tmp_path / "a", [[1, 2]], "fleetx")
    (tmp_path / "a_gpt_Train_indexmap_800ns_64sl_doc_idx.npy").write_bytes(b"x")
    (tmp_path / "README.md").write_text("x")
    (tmp_path / ".hidden.bin").write_bytes(b"x")
    assert open_corpus(tmp_path).num_tokens == 2


@pytest.mark.parametrize("place, told", [("none", "there is no folder"), ("empty", "it holds 0 other files")])
def test_missing_and_empty_folder(tmp_path, place, told):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=told) as caught:
        open_corpus(tmp_path / place, KEY)
    assert (caught.value.problems[0].key, caught.value.problems[0].value) == (KEY, str(tmp_path / place))


def test_nothing_named():
    with pytest.raises(UserError, match="at least one"):
        open_corpus([], KEY)


@pytest.mark.parametrize("file_format, suffix", [("megatron", ".bin"), ("megatron", ".idx"), ("fleetx", "_ids.npy")])
def test_half_of_a_pair_missing(tmp_path, write_corpus, file_format, suffix):
    write_corpus(tmp_path / "a", [[1]], file_format)
    (tmp_path / f"a{suffix}").unlink()
    for place in (tmp_path, tmp_path / "a"):
        with pytest.raises(UserError, match=f"a{suffix} beside it, which is missing"):
            open_corpus(place, KEY)


def test_one_prefix_in_two_formats_is_ambiguous(tmp_path, write_corpus):
    write_corpus(tmp_path / "a", [[1]], "megatron")
    write_corpus(tmp_path / "x" / "a", [[1]], "fleetx")
    for path in (tmp_path / "x").glob("a_i*"):
        path.rename(tmp_path / path.name)
    with pytest.raises(UserError, match="must exist in one format"):
        open_corpus(tmp_path)


def test_sidecars_that_disagree(tmp_path, write_corpus):
    write_corpus(tmp_path / "a", [[1]], eos_id=0)
    write_corpus(tmp_path / "b", [[1]], eos_id=2)
    with pytest.raises(UserError, match="their eos_id differ"):
        open_corpus(tmp_path, KEY)


def test_a_file_without_sidecar_leaves_max_id_open_and_keeps_eos(tmp_path, write_corpus):
    write_corpus(tmp_path / "a", [[1]], eos_id=2)
    write_corpus(tmp_path / "b", [[1]], sidecar=False)
    corpus = open_corpus(tmp_path)
    assert (corpus.eos_id, corpus.max_id) == (2, None)
