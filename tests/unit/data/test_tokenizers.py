"""Tokenizers of all kinds, and what damaged ones say."""

from __future__ import annotations

import json
import logging
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ppfleetx.config.errors import UserError
from ppfleetx.data import load_tokenizer, train_sentencepiece, train_tokenizer
from ppfleetx.data.tokenizers import fingerprint

#: any text that UTF-8 can write, but for SentencePiece's own mark of a space
any_text = st.text(st.characters(codec="utf-8", exclude_characters="\u2581"), max_size=60)
checked = settings(max_examples=100, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="session")
def gpt2_folder(tmp_path_factory):
    """A byte-level BPE of 256 bytes, three merges and <|endoftext|> (259)."""
    from tokenizers import pre_tokenizers

    folder = tmp_path_factory.mktemp("gpt2")
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "ll", "hell", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\nh e\nl l\nhe ll\n")
    return folder


@pytest.fixture(scope="session")
def tokenizer_json(gpt2_folder, tmp_path_factory):
    """The same as a tokenizer.json that adds a special token and truncates, as saved fine-tuning recipes do."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors

    backend = tokenizers.Tokenizer(
        models.BPE.from_file(str(gpt2_folder / "vocab.json"), str(gpt2_folder / "merges.txt"))
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>"])
    backend.post_processor = processors.TemplateProcessing("<|endoftext|> $A", None, [("<|endoftext|>", 259)])
    backend.enable_truncation(4)
    path = tmp_path_factory.mktemp("hf") / "tokenizer.json"
    backend.save(str(path))
    return path


@pytest.fixture(scope="session", params=["sentencepiece", "gpt2", "json"])
def tokenizer(request, sentencepiece_model, gpt2_folder, tokenizer_json):
    return load_tokenizer(
        {"sentencepiece": sentencepiece_model, "gpt2": gpt2_folder, "json": tokenizer_json}[request.param]
    )


@checked
@given(text=any_text)
def test_every_text_comes_back(tokenizer, text):
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


def test_code_comes_back(tokenizer):
    texts = ["def f(x):\r\n    return  x\n\n\n", "  lead", "trail  ", "\ttab\x00", "\n", " ", ""]
    encoded = tokenizer.encode_batch(texts)
    assert [tokenizer.decode(ids) for ids in encoded] == texts
    assert encoded[-1] == []


def test_spelled_out_control_tokens_are_text(tokenizer):
    text = "a</s><|endoftext|><s>b<unk>"
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.eos_id not in ids
    assert tokenizer.decode(ids) == text


def test_control_tokens_decode_to_nothing(tokenizer):
    (ids,) = tokenizer.encode_batch(["a b"])
    assert tokenizer.decode([*ids, tokenizer.eos_id]) == "a b"


def test_runs_of_spaces_are_pieces(sentencepiece_model):
    (ids,) = load_tokenizer(sentencepiece_model).encode_batch([" " * 8])
    assert len(ids) < 4


def test_ids_and_sizes(sentencepiece_model, gpt2_folder, tokenizer_json):
    spm, gpt2, hf = map(load_tokenizer, (sentencepiece_model, gpt2_folder, tokenizer_json))
    assert (spm.vocab_size, spm.eos_id) == (320, 2)
    assert (gpt2.vocab_size, gpt2.eos_id) == (hf.vocab_size, hf.eos_id) == (260, 259)
    assert gpt2.encode_batch(["hello"]) == hf.encode_batch(["hello"]) == [[258, 78]]  # hell, o
    assert load_tokenizer(tokenizer_json.parent).encode_batch(["hello"]) == [[258, 78]]
    assert load_tokenizer(gpt2_folder / "vocab.json").vocab_size == 260
    assert gpt2.path == str(gpt2_folder) and len(fingerprint(gpt2)) == 64
    assert len({fingerprint(each) for each in (spm, gpt2, hf)}) == 3


@pytest.mark.parametrize("file", ["vocab.json", "merges.txt", "tokenizer.json", "tokenizer.model"])
@pytest.mark.parametrize("content", [b"", b"\n"])
def test_c29_empty_file_is_named(tmp_path, gpt2_folder, file, content):
    for path in gpt2_folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / file).write_bytes(content)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(UserError, match="is empty") as caught:
        load_tokenizer(tmp_path)
    assert f"{tmp_path / file} is empty" in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == before  # nothing was kept for later


@pytest.mark.parametrize("merges", ["#version: 0.2\nh e\nq u\n", "#version: 0.2\nh e\n", "#version: 0.2\n"])
def test_c29_merges_that_do_not_match_the_vocabulary(tmp_path, gpt2_folder, merges):
    """Merges of another vocabulary, merges cut off half-way, and none at all."""
    (tmp_path / "vocab.json").write_bytes((gpt2_folder / "vocab.json").read_bytes())
    (tmp_path / "merges.txt").write_text(merges)
    vocab = json.loads((tmp_path / "vocab.json").read_text())
    vocab |= {f"h{'e' * n}": 260 + n for n in range(2, 9)}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    with pytest.raises(UserError) as caught:
        load_tokenizer(tmp_path)
    assert f"{tmp_path}/merges.txt does not match {tmp_path}/vocab.json" in str(caught.value)


@pytest.mark.parametrize(
    "file, content, told",
    [
        ("vocab.json", b"<html>", "vocab.json is no JSON"),
        ("vocab.json", b"{}", "must map tokens to ids"),
        ("vocab.json", b'{"a": "b"}', "must map tokens to ids"),
        ("merges.txt", b"#version: 0.2\nh e l\n", "line 2 must be two tokens"),
        ("merges.txt", b"\xff\xfe", "merges.txt is not UTF-8"),
        ("tokenizer.json", b"<html>", "tokenizer.json is no Hugging Face"),
        ("tokenizer.json", b"{}", "tokenizer.json is no Hugging Face"),
        ("tokenizer.model", b"<html>", "tokenizer.model is no SentencePiece model"),
    ],
)
def test_malformed_file_is_named(tmp_path, gpt2_folder, file, content, told):
    for path in gpt2_folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / file).write_bytes(content)
    with pytest.raises(UserError, match=told):
        load_tokenizer(tmp_path)


def test_dropout_of_a_training_recipe_is_off(tokenizer_json, tmp_path):
    recipe = json.loads(tokenizer_json.read_text())
    recipe["model"]["dropout"] = 0.9
    (tmp_path / "tokenizer.json").write_text(json.dumps(recipe))
    texts = ["the theory of the thing " * 20] * 5
    expected = load_tokenizer(tokenizer_json).encode_batch(texts)
    assert load_tokenizer(tmp_path).encode_batch(texts) == expected


def test_missing_files(tmp_path, gpt2_folder):
    with pytest.raises(UserError, match=r"none\.model cannot be read: No such file"):
        load_tokenizer(tmp_path / "none.model")
    with pytest.raises(UserError, match=r"must hold tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "vocab.json").write_bytes((gpt2_folder / "vocab.json").read_bytes())
    with pytest.raises(UserError, match=r"merges\.txt cannot be read"):
        load_tokenizer(tmp_path)


def test_byte_symbols_that_are_missing_are_warned_of(tmp_path, caplog):
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1, "ab": 2}')
    (tmp_path / "merges.txt").write_text("a b\n")
    assert load_tokenizer(tmp_path).encode_batch(["ab"]) == [[2]]
    assert "lacks 254 of the 256 byte symbols" in caplog.text


def test_training_is_deterministic(text_folder, tmp_path):
    models = [
        train_sentencepiece([str(text_folder)], str(tmp_path / name), 300, model_type="unigram").read_bytes()
        for name in ("a", "b")
    ]
    assert models[0] == models[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.model", "b.model"]


@pytest.mark.parametrize(
    "vocab_size, told", [(100_000, "the text yields at most"), (10, "need at least"), (-1, "take 260 ids")]
)
def test_vocabulary_that_does_not_fit_the_text(text_folder, tmp_path, vocab_size, told):
    with pytest.raises(UserError, match=told) as caught:
        train_sentencepiece([str(text_folder)], str(tmp_path / "x"), vocab_size)
    assert caught.value.problems[0].key == "--vocab-size"
    assert list(tmp_path.iterdir()) == []


def test_long_lines_are_cut_not_left_out(tmp_path):
    """SentencePiece leaves out lines of more than 4192 bytes; here that would be all the text."""
    (tmp_path / "a.txt").write_text("alpha beta " * 800 + "\n" + "語" * 3000)
    pieces = train_tokenizer._lines(["alpha beta " * 800, "語" * 3000, "short"])
    lines = list(pieces)
    assert "".join(lines) == "alpha beta " * 800 + "語" * 3000 + "short"
    assert max(len(line.encode()) for line in lines) <= 4192
    assert all(line.startswith(" ") for line in lines[1:9])  # words stay whole
    model = train_sentencepiece([str(tmp_path / "a.txt")], str(tmp_path / "x"), 272)
    assert min(load_tokenizer(model).encode_batch([" alpha beta語"])[0]) >= 260  # learned, not spelled in bytes


def test_a_full_disk_leaves_no_model(text_folder, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(train_tokenizer.os, "replace", full)
    with pytest.raises(UserError, match="No space left"):
        train_sentencepiece([str(text_folder)], str(tmp_path / "x"), 300)
    assert list(tmp_path.iterdir()) == []


def test_training_makes_bpe_unless_told_and_says_what_it_does(text_folder, tmp_path, caplog):
    """What takes long is told before it begins; the bytes read are those of the files."""
    seen = []
    with caplog.at_level(logging.INFO, "ppfleetx"):
        default = train_sentencepiece([str(text_folder)], str(tmp_path / "a"), 300, on_progress=seen.append)
    texts = [line for path in text_folder.iterdir() for line in path.read_text().splitlines() if line]
    lines, characters = len(texts), sum(map(len, texts))
    told = (
        f"training a bpe model of 300 tokens on {lines:,} lines, {characters:,} characters (takes 1.5 s for 8 million "
    )
    assert told in caplog.text
    bpe = train_sentencepiece([str(text_folder)], str(tmp_path / "b"), 300, model_type="bpe")
    unigram = train_sentencepiece([str(text_folder)], str(tmp_path / "c"), 300, model_type="unigram")
    assert default.read_bytes() == bpe.read_bytes() != unigram.read_bytes()
    read = [one for one in seen if one.phase == "reading"]
    size = sum(path.stat().st_size for path in text_folder.iterdir())
    assert (read[-1].done, read[-1].total, read[-1].note) == (size, size, f"{lines} lines")


def test_the_trainers_clock_ticks_while_it_works(text_folder, tmp_path, monkeypatch):
    """SentencePiece tells nothing itself."""
    seen, train = [], train_tokenizer._train

    def slow(*arguments):
        time.sleep(1.2)
        return train(*arguments)

    monkeypatch.setattr(train_tokenizer, "_train", slow)
    train_sentencepiece([str(text_folder)], str(tmp_path / "a"), 300, on_progress=seen.append)
    ticks = [one for one in seen if one.phase == "training"]
    assert len(ticks) >= 2 and "lines" in ticks[0].note


def test_of_a_large_corpus_a_sample_is_trained_on_and_that_is_said(text_folder, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(train_tokenizer, "MAX_LINES", 100)
    with caplog.at_level(logging.INFO, "ppfleetx"):
        train_sentencepiece([str(text_folder)], str(tmp_path / "a"), 300)
    assert "on 100 lines (of " in caplog.text and "chosen by chance" in caplog.text


def test_no_text_to_train_on(tmp_path):
    (tmp_path / "empty.txt").write_text("\n\n")
    with pytest.raises(UserError, match="there must be text"):
        train_sentencepiece([str(tmp_path)], str(tmp_path / "x"), 300)


def test_bytes_need_no_file_and_come_back():
    tokenizer = load_tokenizer("bytes")
    texts = ["Hello\n", "", "é 中\t"]
    assert tokenizer.encode_batch(texts) == [list(text.encode()) for text in texts]
    assert [tokenizer.decode(ids) for ids in tokenizer.encode_batch(texts)] == texts
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (256, 0)
