"""X_meta.json: optional, checked, and read whether it is older or newer than the reader."""

from __future__ import annotations

import json

import pytest

from ppfleetx.config.errors import UserError
from ppfleetx.data import open_corpus
from ppfleetx.data.token_files import UNTOLD

DOCUMENTS = [[5, 6, 7], [8], [9, 10, 11, 12]]


def test_sidecar_is_optional_and_must_belong(tmp_path, write_corpus):
    write_corpus(tmp_path / "a", DOCUMENTS)
    sidecar = tmp_path / "a_meta.json"
    meta = json.loads(sidecar.read_text())
    assert (meta["format"], meta["num_documents"], meta["num_tokens"], meta["max_id"]) == ("megatron", 3, 8, 12)
    sidecar.write_text(json.dumps({**meta, "num_tokens": 9}))
    with pytest.raises(UserError, match="belongs to another corpus"):
        open_corpus(tmp_path)
    sidecar.write_text("{")
    with pytest.raises(UserError, match=r"a_meta\.json is no readable sidecar"):
        open_corpus(tmp_path)
    for wrong in ({"eos_id": -1}, {"eos_id": 1000}, {"tokenizer_sha256": []}, {"vocab_size": "x"}):
        sidecar.write_text(json.dumps({**meta, **wrong}))
        with pytest.raises(UserError, match=r"a_meta\.json is no readable sidecar"):
            open_corpus(tmp_path)
    sidecar.write_text("[" * 100_000)
    with pytest.raises(UserError, match=r"a_meta\.json is no readable sidecar"):
        open_corpus(tmp_path)
    sidecar.unlink()
    assert open_corpus(tmp_path).max_id is None


#: the fields that the first readers ask for; they pass over others
FIRST_FIELDS = {
    "format", "vocab_size", "eos_id", "num_documents", "num_tokens", "max_id", "tokenizer", "tokenizer_sha256",
}  # fmt: skip


def test_sidecars_of_before_and_of_later_are_read(tmp_path, write_corpus):
    """Fields of the seed and of bos came later: files lack them, and earlier readers find all that they ask for."""
    write_corpus(tmp_path / "a", DOCUMENTS)
    sidecar = tmp_path / "a_meta.json"
    meta = json.loads(sidecar.read_text())
    assert set(meta) > FIRST_FIELDS and (meta["bos_id"], meta["shuffle_seed"]) == (None, None)
    assert open_corpus(tmp_path).in_input_order
    sidecar.write_text(json.dumps({**meta, "shuffle_seed": 0, "bos_id": 999, "later": [1]}))
    corpus = open_corpus(tmp_path)
    assert (corpus.files[0].meta.shuffle_seed, corpus.files[0].meta.bos_id) == (0, 999) and not corpus.in_input_order
    sidecar.write_text(json.dumps({name: meta[name] for name in FIRST_FIELDS}))
    corpus = open_corpus(tmp_path)
    assert (corpus.files[0].meta.shuffle_seed, corpus.files[0].meta.bos_id) == (UNTOLD, None)
    assert not corpus.in_input_order and corpus.max_id == 12
    for wrong in (
        {"bos_id": 1000},
        {"bos_id": True},
        {"shuffle_seed": -2},
        {"shuffle_seed": "7"},
        {"shuffle_seed": 1.5},
    ):
        sidecar.write_text(json.dumps({**meta, **wrong}))
        with pytest.raises(UserError, match=r"a_meta\.json is no readable sidecar"):
            open_corpus(tmp_path)
