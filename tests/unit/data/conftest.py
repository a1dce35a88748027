"""Corpora and tokenizers that the data tests share."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from ppfleetx.data import CorpusWriter


@pytest.fixture
def write_corpus():
    """write_corpus(prefix, documents) writes a corpus of documents (lists of ids) and returns its prefix."""

    def write(prefix, documents, file_format="megatron", vocab_size=1000, eos_id=None, sidecar=True):
        with CorpusWriter(prefix, file_format, vocab_size) as writer:
            for document in documents:
                writer.append(document)
            writer.finish(eos_id)
        if not sidecar:
            Path(f"{prefix}_meta.json").unlink()
        return prefix

    return write


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Forty small documents of words, newlines and runs of spaces; the same every time."""
    generator = random.Random(7)
    words = [
        "def",
        "return",
        "value",
        "tensor",
        "for",
        "range",
        "import",
        "loss",
        "(x)",
        "=",
        "[0]",
        "batch",
        "é",
        "日本",
    ]
    documents = []
    for _ in range(40):
        lines = [
            " " * generator.choice([0, 4, 8]) + " ".join(generator.choices(words, k=6))
            for _ in range(generator.randrange(5, 30))
        ]
        documents.append("\n".join(lines) + "\n")
    return documents


@pytest.fixture(scope="session")
def text_folder(texts, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for number, text in enumerate(texts):
        (folder / f"{number:02}.txt").write_text(text, encoding="utf-8", newline="")
    return folder


@pytest.fixture(scope="session")
def sentencepiece_model(text_folder, tmp_path_factory) -> Path:
    """A trained SentencePiece model of 320 tokens; </s> is 2."""
    from ppfleetx.data import train_sentencepiece

    return train_sentencepiece([str(text_folder)], str(tmp_path_factory.mktemp("spm") / "spm"), 320, model_type="bpe")
