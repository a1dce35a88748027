"""Documents in, corpus out."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
import tempfile

import numpy as np
import pytest

from ppfleetx.config.errors import UserError
from ppfleetx.data import (
    PreprocessJob,
    load_tokenizer,
    open_corpus,
    preprocess,
    preprocess_corpus,
    shuffle,
    token_writer,
)
from ppfleetx.data.progress import Progress


@pytest.fixture
def job(tmp_path, sentencepiece_model) -> PreprocessJob:
    """Three documents and two empty ones."""
    path = tmp_path / "in.jsonl"
    texts = ["def f(x):\n    return x\n", "", "日本", " \n", "loss </s> loss"]
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return PreprocessJob([str(path)], str(tmp_path / "out" / "c"), str(sentencepiece_model))


@pytest.mark.parametrize("file_format", ["megatron", "fleetx"])
@pytest.mark.parametrize("append_eos", [True, False])
def test_c30_every_document_ends_with_eos_or_none_does(job, file_format, append_eos):
    job = dataclasses.replace(job, format=file_format, append_eos=append_eos)
    summary = preprocess_corpus(job)
    corpus, tokenizer = open_corpus(job.output_prefix), load_tokenizer(job.tokenizer)
    ids = corpus.read(0, corpus.num_tokens)
    assert corpus.num_documents == 3 and summary.num_empty == 2
    assert (ids == 2).sum() == (3 if append_eos else 0)
    if append_eos:
        assert ids[corpus.boundaries[1:] - 1].tolist() == [2, 2, 2]
    text = tokenizer.decode([i for i in ids.tolist() if i != 2])
    assert text == "def f(x):\n    return x\n日本loss </s> loss"
    assert (corpus.eos_id, corpus.max_id) == (2, ids.max())


def test_sidecar_and_summary(job, sentencepiece_model):
    summary = preprocess_corpus(job)
    meta = open_corpus(job.output_prefix).files[0].meta
    assert meta is not None and meta.tokenizer == str(sentencepiece_model) and len(meta.tokenizer_sha256) == 64
    assert (meta.vocab_size, meta.num_documents, meta.num_tokens) == (320, 3, summary.num_tokens)
    told = f"wrote {job.output_prefix} (megatron): 3 documents, {summary.num_tokens} tokens from 1 files, "
    assert str(summary).startswith(told + "2 empty documents skipped, ")


def test_workers_and_batches_do_not_change_the_corpus(job, text_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(preprocess, "_BATCH_DOCUMENTS", 7)
    contents, counts = [], []
    for workers in (1, 2):
        prefix = str(tmp_path / f"w{workers}")
        one = dataclasses.replace(
            job, inputs=[str(text_folder)], output_prefix=prefix, workers=workers, append_eos=True
        )
        done: list[Progress] = []
        preprocess_corpus(one, done.append)
        contents.append([(tmp_path / f"w{workers}{suffix}").read_bytes() for suffix in (".bin", ".idx")])
        counts.append(done)
    assert contents[0] == contents[1]
    total = sum(path.stat().st_size for path in text_folder.iterdir())
    for done in counts:
        assert [one.note.split(",")[0] for one in done] == [f"{n} documents" for n in (7, 14, 21, 28, 35, 40)]
        assert {(one.phase, one.total, one.unit) for one in done} == {("tokenizing", total, "B")}
        assert [one.done for one in done] == sorted(one.done for one in done) and done[-1].done == total


@pytest.mark.parametrize("file_format", ["megatron", "fleetx"])
def test_a_shuffled_corpus_holds_the_same_documents_in_the_seeds_order(
    job, text_folder, tmp_path, monkeypatch, file_format
):
    """The same files for any number of workers and any memory; the order is that of the seed's numbers."""
    monkeypatch.setattr(preprocess, "_BATCH_DOCUMENTS", 7)
    job = dataclasses.replace(job, inputs=[str(text_folder)], append_eos=True, format=file_format)

    def made(name, memory_bytes=1 << 20, **changes):
        monkeypatch.setattr(shuffle, "MEMORY_BYTES", memory_bytes)
        done: list[Progress] = []
        preprocess_corpus(dataclasses.replace(job, output_prefix=str(tmp_path / name / "c"), **changes), done.append)
        files = {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        assert len(files) == 3  # and nothing else is left
        return files, done

    def documents(name):
        corpus = open_corpus(tmp_path / name)
        return [corpus.read(int(a), int(b - a)).tolist() for a, b in itertools.pairwise(corpus.boundaries)]

    made("plain")
    first, done = made("one", shuffle=1024)
    assert made("two", shuffle=1024, workers=2)[0] == made("tiny", 500, shuffle=1024)[0] == first
    assert made("tiny2", 500, shuffle=1024, workers=2)[0] == first != made("other", shuffle=1025)[0]
    numbers = np.random.Philox(key=1024).random_raw(40).tolist()
    assert documents("one") == [documents("plain")[i] for i in sorted(range(40), key=numbers.__getitem__)]
    metas = [open_corpus(tmp_path / name).files[0].meta for name in ("plain", "one")]
    assert [meta.shuffle_seed for meta in metas] == [None, 1024]
    assert [one.phase for one in done] == ["tokenizing"] * 6 + ["shuffling"]
    assert (done[-1].done, done[-1].total) == (metas[1].num_tokens,) * 2


@pytest.mark.parametrize("failing", ["input", "spool", "corpus"])
def test_a_shuffle_that_fails_leaves_nothing(job, tmp_path, monkeypatch, failing):
    """Bad input after documents were written aside; a full disk there; a full disk when the corpus is written."""
    monkeypatch.setattr(shuffle, "MEMORY_BYTES", 2)
    monkeypatch.setattr(preprocess, "_BATCH_DOCUMENTS", 1)
    job = dataclasses.replace(job, shuffle=1)
    told = "No space left"
    if failing == "input":
        (tmp_path / "bad.jsonl").write_text("{")
        job, told = dataclasses.replace(job, inputs=[*job.inputs, str(tmp_path / "bad.jsonl")]), "line 1"
    elif failing == "spool":
        monkeypatch.setattr(tempfile, "TemporaryFile", lambda *_, dir: open("/dev/full", "w+b", 0))  # noqa: SIM115
    else:
        monkeypatch.setattr(token_writer, "open", lambda path, mode: open("/dev/full", mode, 0), raising=False)  # noqa: SIM115
    with pytest.raises(UserError, match=told):
        preprocess_corpus(job)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("append_eos", [True, False])
def test_documents_begin_with_bos(job, append_eos):
    summary = preprocess_corpus(dataclasses.replace(job, prepend_bos=True, append_eos=append_eos))
    corpus = open_corpus(job.output_prefix)
    ids = corpus.read(0, corpus.num_tokens)
    assert ids[corpus.boundaries[:-1]].tolist() == [1, 1, 1] and (ids == 1).sum() == 3
    assert (ids[corpus.boundaries[1:] - 1] == 2).tolist() == [append_eos] * 3
    assert (corpus.files[0].meta.bos_id, corpus.eos_id) == (1, 2)
    assert ("each begins with '<s>' (id 1, the model)" in str(summary)) and (
        "each ends with" in str(summary)
    ) == append_eos


def test_without_bos_the_sidecar_names_none(job):
    preprocess_corpus(job)
    assert open_corpus(job.output_prefix).files[0].meta.bos_id is None


@pytest.mark.parametrize(
    "changes, key, told",
    [
        ({"shuffle": -1}, "--shuffle", "a seed is a whole number"),
        ({"shuffle": 1 << 63}, "--shuffle", "a seed is a whole number"),
        ({"bos_token": "<s>"}, "--bos-token", "add --prepend-bos"),
        ({"eos_token": "</S>"}, "--eos-token", "did you mean </s>"),
        ({"prepend_bos": True, "bos_token": "<S>"}, "--bos-token", "did you mean <s>"),
        ({"tokenizer": "bytes", "prepend_bos": True}, "--prepend-bos", "--bos-token TOKEN"),
        ({"tokenizer": "bytes", "eos_token": "x"}, "--eos-token", "byte 0 ends documents"),
    ],
)
def test_choices_that_cannot_be(job, tmp_path, changes, key, told):
    with pytest.raises(UserError, match=told) as caught:
        preprocess_corpus(dataclasses.replace(job, **changes))
    assert caught.value.problems[0].key == key and not (tmp_path / "out").exists()


def test_a_failing_run_leaves_nothing(job, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"text": "x"}\n{')
    with pytest.raises(UserError, match=r"bad\.jsonl line 2"):
        preprocess_corpus(dataclasses.replace(job, inputs=[*job.inputs, str(tmp_path / "bad.jsonl")]))
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("file_format", ["megatron", "fleetx"])
@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_full_disk_is_a_users_error_and_leaves_nothing(job, tmp_path, monkeypatch, file_format, call):
    def full(*_):
        raise OSError(28, "No space left on device")

    if call == "write":
        monkeypatch.setattr(token_writer, "open", lambda path, mode: open("/dev/full", mode), raising=False)  # noqa: SIM115
    else:
        monkeypatch.setattr(token_writer.os, call, full)
    with pytest.raises(UserError, match=r"its files cannot be written.*No space left") as caught:
        preprocess_corpus(dataclasses.replace(job, format=file_format))
    assert caught.value.problems[0].key == "--output-prefix"
    assert not any(path.name.endswith(".idx") or ".tmp-" in path.name for path in (tmp_path / "out").iterdir())


@pytest.mark.parametrize("prefix", ["", ".", "out/", "out/.."])
def test_a_prefix_without_a_name_is_refused(job, prefix, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="must end in a name"):
        preprocess_corpus(dataclasses.replace(job, output_prefix=prefix))
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def _die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_worker_is_told_and_leaves_nothing(job, tmp_path, monkeypatch):
    monkeypatch.setattr(preprocess, "_encode_in_worker", _die)
    with pytest.raises(UserError, match="a worker was killed") as caught:
        preprocess_corpus(dataclasses.replace(job, workers=2))
    assert caught.value.problems[0].key == "--workers"
    assert list((tmp_path / "out").iterdir()) == []


def test_no_text_at_all(job, tmp_path):
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(UserError, match="no text in 1 files"):
        preprocess_corpus(dataclasses.replace(job, inputs=[str(tmp_path / "empty.txt")]))
    assert list((tmp_path / "out").iterdir()) == []


def test_append_eos_needs_an_eos(job, tmp_path):
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1, "ab": 2}')
    (tmp_path / "merges.txt").write_text("a b\n")
    job = dataclasses.replace(job, tokenizer=str(tmp_path), append_eos=True)
    with pytest.raises(UserError, match="--append-eos") as caught:
        preprocess_corpus(job)
    assert "--eos-token TOKEN" in caught.value.problems[0].fix
    (tmp_path / "a.txt").write_text("aabb")
    preprocess_corpus(dataclasses.replace(job, eos_token="ab", inputs=[str(tmp_path / "a.txt")]))
    corpus = open_corpus(job.output_prefix)
    assert corpus.read(0, corpus.num_tokens).tolist() == [0, 0, 1, 1, 2] and corpus.eos_id == 2


@pytest.mark.parametrize("change, key", [({"workers": 0}, "--workers"), ({"tokenizer": "none"}, "--tokenizer")])
def test_bad_arguments(job, change, key):
    with pytest.raises(UserError) as caught:
        preprocess_corpus(dataclasses.replace(job, **change))
    assert caught.value.problems[0].key == key
