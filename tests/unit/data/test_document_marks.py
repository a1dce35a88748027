"""Which token ends documents: named, of the tokenizer's files, or guessed and said so."""

from __future__ import annotations

import json
import logging

import pytest

from ppfleetx.config.errors import UserError
from ppfleetx.data import PreprocessJob, load_tokenizer, open_corpus, preprocess_corpus
from ppfleetx.data.tokenizers import MarkChoice

TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"]  # ids 256 to 259, after the bytes
FILES = ("tokenizer_config.json", "config.json", "generation_config.json", "special_tokens_map.json")


@pytest.fixture
def folder(tmp_path):
    """A byte-level tokenizer.json as an instruct model has it."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    backend = tokenizers.Tokenizer(
        models.BPE({token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(TOKENS)
    backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(folder, **contents):
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def eos_of(place, **options):
    eos = load_tokenizer(place, marks=MarkChoice(**options)).eos
    return eos.text, eos.id, eos.source


@pytest.mark.parametrize(
    "name, content",
    [
        ("tokenizer_config", {"eos_token": "<|im_end|>"}),
        ("tokenizer_config", {"eos_token": {"content": "<|im_end|>", "__type": "AddedToken", "special": True}}),
        ("config", {"eos_token_id": 258}),
        ("config", {"eos_token_id": [258, 256]}),
        ("generation_config", {"eos_token_id": [258]}),
        ("special_tokens_map", {"eos_token": {"content": "<|im_end|>"}}),
        ("special_tokens_map", {"eos_token": "<|im_end|>"}),
    ],
)
@pytest.mark.parametrize("place", ["", "tokenizer.json"])
def test_w26_the_token_of_the_tokenizers_own_files(folder, name, content, place):
    """Where names alone would say <|endoftext|>."""
    write(folder, **{name: content})
    assert eos_of(folder / place) == ("<|im_end|>", 258, f"{name}.json")


def test_the_first_file_that_names_one_counts(folder):
    """And a file that names none, or names nothing, is passed over."""
    write(folder, special_tokens_map={"eos_token": "<|im_end|>"})
    assert eos_of(folder)[1:] == (258, "special_tokens_map.json")
    write(folder, generation_config={"eos_token_id": 257}, config={}, tokenizer_config={"eos_token": None})
    assert eos_of(folder)[1:] == (257, "generation_config.json")
    write(folder, config={"eos_token_id": 256})
    assert eos_of(folder)[1:] == (256, "config.json")
    write(folder, tokenizer_config={"eos_token": "<|im_end|>"})
    assert eos_of(folder)[1:] == (258, "tokenizer_config.json")
    assert eos_of(folder, eos_token="<|im_start|>") == ("<|im_start|>", 257, "--eos-token")


def test_bos_is_looked_for_when_it_is_asked_for(folder):
    write(folder, tokenizer_config={"bos_token": "<|im_start|>"}, config={"bos_token_id": 256})
    assert load_tokenizer(folder).bos is None
    assert load_tokenizer(folder, marks=MarkChoice(bos=True)).bos == ("<|im_start|>", 257, "tokenizer_config.json")
    assert load_tokenizer(folder, marks=MarkChoice(bos_token="<s>", bos=True)).bos == ("<s>", 259, "--bos-token")


def test_w26_a_corpus_ends_its_documents_with_it(folder, tmp_path):
    write(folder, tokenizer_config={"eos_token": "<|im_end|>"})
    (tmp_path / "a.txt").write_text("a<|im_end|>b")
    job = PreprocessJob([str(tmp_path / "a.txt")], str(tmp_path / "c"), str(folder), append_eos=True)
    summary = preprocess_corpus(job)
    corpus = open_corpus(tmp_path / "c")
    ids = corpus.read(0, corpus.num_tokens).tolist()
    assert corpus.eos_id == ids[-1] == 258 and ids.count(258) == 1 and len(ids) == 13
    assert "each ends with '<|im_end|>' (id 258, tokenizer_config.json)" in str(summary)


def test_a_guess_is_said(folder, tmp_path, caplog):
    (tmp_path / "a.txt").write_text("a")
    job = {"inputs": [str(tmp_path / "a.txt")], "tokenizer": str(folder), "overwrite": True, "prepend_bos": True}
    preprocess_corpus(PreprocessJob(output_prefix=str(tmp_path / "c"), **job))
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert "the end-of-document token is guessed to be '<|endoftext|>' (id 256)" in caplog.text
    assert "--eos-token TOKEN names another" in caplog.text and "to be '<s>' (id 259)" in caplog.text
    caplog.clear()
    preprocess_corpus(PreprocessJob(output_prefix=str(tmp_path / "c"), eos_token="<|im_end|>", bos_token="<s>", **job))
    assert not caplog.records


def test_a_sentencepiece_model_says_it_itself(sentencepiece_model, tmp_path):
    """Only a tokenizer_config.json beside a tokenizer.model knows better; other names are nothing of Hugging Face's."""
    for name in ("tokenizer", "mine"):
        (tmp_path / f"{name}.model").write_bytes(sentencepiece_model.read_bytes())
    write(tmp_path, config={"eos_token_id": 1})
    assert eos_of(tmp_path) == eos_of(tmp_path / "tokenizer.model") == ("</s>", 2, "the model")
    write(tmp_path, tokenizer_config={"eos_token": "<pad>"})
    assert eos_of(tmp_path) == ("<pad>", 3, "tokenizer_config.json")
    assert eos_of(tmp_path / "mine.model") == ("</s>", 2, "the model")
    assert load_tokenizer(sentencepiece_model, marks=MarkChoice(bos=True)).bos == ("<s>", 1, "the model")


def test_a_gpt2_folder_has_them_too(tmp_path):
    from tokenizers import pre_tokenizers

    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *TOKENS]
    write(tmp_path, vocab={token: i for i, token in enumerate(tokens)}, config={"eos_token_id": 258})
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    for place in (tmp_path, tmp_path / "vocab.json"):
        assert eos_of(place) == ("<|im_end|>", 258, "config.json")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "content, told",
    [
        ("{", "it is no JSON"),
        ("", "it is no JSON"),
        ("[1]", "it must hold an object, not list"),
        ('{"eos_token": 7, "eos_token_id": "7"}', "must be a"),
        ('{"eos_token": ["</s>"], "eos_token_id": true}', "must be a"),
        ('{"eos_token": {"text": "x"}, "eos_token_id": [1.5]}', "must be a"),
        ('{"eos_token": "<|gone|>", "eos_token_id": 999}', "is not in the tokenizer's vocabulary"),
        ('{"eos_token": "<|gone|>", "eos_token_id": -1}', "is not in the tokenizer's vocabulary"),
        ("[" * 100_000, "it is no JSON"),
    ],
)
def test_malformed_files_are_named(folder, name, content, told):
    (folder / name).write_text(content)
    with pytest.raises(UserError, match=told) as caught:
        load_tokenizer(folder)
    (problem,) = caught.value.problems
    assert problem.key == "--tokenizer" and problem.rule.startswith(f"{folder / name}: ")
    assert "--eos-token" in problem.fix
    assert eos_of(folder, eos_token="<|im_end|>")[1] == 258  # the way out


def test_an_unknown_token_is_told_with_its_neighbours(folder):
    with pytest.raises(UserError, match="must be a token of the tokenizer") as caught:
        load_tokenizer(folder, marks=MarkChoice("<|im_ends|>"))
    (problem,) = caught.value.problems
    assert (problem.key, problem.value) == ("--eos-token", "<|im_ends|>") and "<|im_end|>" in problem.fix


def test_no_end_at_all_names_candidates(tmp_path):
    import tokenizers
    from tokenizers import models

    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "<stop>": 1, "[UNK]": 2}, unk_token="[UNK]"))
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("a")
    job = PreprocessJob([str(tmp_path / "a.txt")], str(tmp_path / "c"), str(tmp_path), append_eos=True)
    with pytest.raises(UserError, match="neither its files nor a usual name tells one") as caught:
        preprocess_corpus(job)
    assert "perhaps one of <stop>, [UNK]" in caught.value.problems[0].fix
