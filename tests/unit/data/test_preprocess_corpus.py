"""Documents in, corpus out."""

from __future__ import annotations

import dataclasses
import json
import os
import signal

import pytest

from ppfleetx.config.errors import UserError
from ppfleetx.data import PreprocessJob, load_tokenizer, open_corpus, preprocess, preprocess_corpus, token_writer


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
        done: list[int] = []
        preprocess_corpus(one, done.append)
        contents.append([(tmp_path / f"w{workers}{suffix}").read_bytes() for suffix in (".bin", ".idx")])
        counts.append(done)
    assert contents[0] == contents[1]
    assert counts == [[7, 7, 7, 7, 7, 5]] * 2


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
    with pytest.raises(UserError, match="--append-eos"):
        preprocess_corpus(dataclasses.replace(job, tokenizer=str(tmp_path), append_eos=True))


@pytest.mark.parametrize("change, key", [({"workers": 0}, "--workers"), ({"tokenizer": "none"}, "--tokenizer")])
def test_bad_arguments(job, change, key):
    with pytest.raises(UserError) as caught:
        preprocess_corpus(dataclasses.replace(job, **change))
    assert caught.value.problems[0].key == key
