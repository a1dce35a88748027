"""Tokenizers: SentencePiece models, Hugging Face `tokenizer.json`, GPT-2 folders with `vocab.json` and `merges.txt`, bytes.

No text yields the token that ends or begins documents, whatever that token is to the tokenizer: no document can end itself.
Other control tokens, spelled out, are text as well, unless the vocabulary has them as words. No token is added before or
after a text; ends and beginnings of documents are the caller's to add.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ppfleetx.config.errors import Problem, UserError
from ppfleetx.data.document_marks import BOS, EOS, Mark, find_mark
from ppfleetx.data.tokenizer_files import BadTokenizerError, check_all_made, read_content, read_merges, read_vocab
from ppfleetx.data.unspellable import unspellable_json, unspellable_proto

_LOG = logging.getLogger("ppfleetx")

#: name of the tokenizer that needs no file
BYTES = "bytes"

#: a piece that stands for one byte
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


class Tokenizer(Protocol):
    """What the data room asks of a tokenizer.

    Attributes:
        path: path as the user gave it.
        files: the files it was read from.
        vocab_size: all ids lie in [0, vocab_size).
        eos: end-of-document token; None if nothing tells one.
        bos: begin-of-document token; None if nothing tells one, or nobody asked for it.
    """

    path: str
    files: tuple[Path, ...]
    vocab_size: int
    eos: Mark | None
    bos: Mark | None

    @property
    def eos_id(self) -> int | None:
        """Id of `eos`."""

    def vocab(self) -> dict[str, int]:
        """Token to id."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, never that of `eos` or `bos`; an empty text gives an empty list."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; control tokens give none."""


@dataclass(frozen=True)
class MarkChoice:
    """Which tokens mark documents: those named, else what the tokenizer's files say. `bos` says whether one begins them."""

    eos_token: str | None = None
    bos_token: str | None = None
    bos: bool = False


def load_tokenizer(path: str | Path, key: str = "--tokenizer", marks: MarkChoice | None = None) -> Tokenizer:
    """Load a tokenizer: a SentencePiece `.model`, a `tokenizer.json`, a folder, or the word `bytes`.

    In a folder the first of these counts: `tokenizer.json`, `tokenizer.model`, `vocab.json` with `merges.txt`.

    Args:
        key: YAML key or option to name in errors.
        marks: which tokens end and begin documents; None for what the tokenizer's files say of the end.

    Raises:
        UserError: a file is missing, empty or malformed, merges do not match the vocabulary, or a token that marks documents
            is not in the vocabulary or cannot do so.
    """
    marks = marks or MarkChoice()
    if str(path) == BYTES:
        if (named := marks.eos_token or marks.bos_token) is not None:
            option = EOS.option if marks.eos_token else BOS.option
            raise UserError(
                Problem(option, named, f"the tokenizer {BYTES} has no names for tokens; byte 0 ends documents")
            )
        return _Bytes()
    place = Path(path).expanduser()
    try:
        return _load(place, str(path), marks)
    except BadTokenizerError as bad:
        raise UserError(Problem(key, str(path), bad.rule, bad.fix)) from None


def fingerprint(tokenizer: Tokenizer) -> str:
    """sha256 over the tokenizer's files, hexadecimal."""
    digest = hashlib.sha256()
    for file in tokenizer.files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _load(place: Path, given: str, marks: MarkChoice) -> Tokenizer:
    if place.is_dir():
        for name in ("tokenizer.json", "tokenizer.model"):
            if (place / name).is_file():
                return _load(place / name, given, marks)
        if not any((place / name).is_file() for name in ("vocab.json", "merges.txt")):
            raise BadTokenizerError(f"{place} must hold tokenizer.json, tokenizer.model, or vocab.json and merges.txt")
        return _load_gpt2(place / "vocab.json", place / "merges.txt", given, marks)
    if place.name in ("vocab.json", "merges.txt"):
        return _load_gpt2(place.with_name("vocab.json"), place.with_name("merges.txt"), given, marks)
    if place.suffix == ".json":
        return _load_tokenizer_json(place, given, marks)
    return _SentencePiece(place, given, marks)


class _Marked:
    """The tokens that mark documents, and keeping them apart from text."""

    eos: Mark | None = None
    bos: Mark | None = None
    _told_unknown = False

    def _find_marks(
        self, vocab: dict[str, int], folder: Path | None, marks: MarkChoice, own: Sequence[Mark | None]
    ) -> None:
        self.eos = find_mark(EOS, vocab, folder, marks.eos_token, own[0])
        self.bos = find_mark(BOS, vocab, folder, marks.bos_token, own[1]) if marks.bos else None
        for kind, mark in ((EOS, self.eos), (BOS, self.bos)):
            if mark and (len(mark.text) == 1 or _BYTE_TOKEN.fullmatch(mark.text)):
                rule = (
                    f"{mark.source}: the {kind.title} token must be none that text is spelled with, as {mark.text!r} is"
                )
                raise BadTokenizerError(rule, f"name another with {kind.option}")

    @property
    def eos_id(self) -> int | None:
        return self.eos.id if self.eos else None

    @property
    def mark_ids(self) -> set[int]:
        return {mark.id for mark in (self.eos, self.bos) if mark}

    def _plain(self, ids: list[int]) -> list[int]:
        """`ids` without marks."""
        marks = self.mark_ids
        return [index for index in ids if index not in marks] if any(mark in ids for mark in marks) else ids

    def _plain_text(self, ids: list[int]) -> list[int]:
        """Ids of a text without marks, which are there only if one stands for unknown text too."""
        plain = self._plain(ids)
        if len(plain) < len(ids) and not self._told_unknown:
            self._told_unknown = True
            marks = " and ".join(mark.text for mark in (self.eos, self.bos) if mark)
            _LOG.warning("%s stands for unknown text too; text that the tokenizer does not know is left out", marks)
        return plain


class _Bytes(_Marked):
    """The bytes of UTF-8 as ids; 0, which no text holds, ends a document. For tests and first steps: nothing to train."""

    path = BYTES
    files: tuple[Path, ...] = ()
    vocab_size = 256
    eos: Mark | None = Mark("\0", 0, "byte 0")

    def vocab(self) -> dict[str, int]:
        return {}

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.replace("\0", "").encode()) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(index for index in ids if index).decode(errors="replace")


class _SentencePiece(_Marked):
    """A SentencePiece model. U+2581, its mark for a space, decodes to a space."""

    def __init__(self, file: Path, given: str, marks: MarkChoice):
        content = read_content(file)
        processor = _processor(content, file)
        self.path = given
        self.files: tuple[Path, ...] = (file,)
        self.vocab_size = int(processor.vocab_size())
        self._vocab = {processor.id_to_piece(index): index for index in range(self.vocab_size)}
        own = [
            Mark(processor.id_to_piece(index), index, "the model") if index >= 0 else None
            for index in (int(processor.eos_id()), int(processor.bos_id()))
        ]
        # other names are nothing of Hugging Face's, whose files may lie there for another tokenizer
        folder = file.parent if file.name == "tokenizer.model" else None
        self._find_marks(self._vocab, folder, marks, own)
        in_text = {
            index for index in self.mark_ids if not processor.is_control(index) and not processor.is_unknown(index)
        }
        self._processor: Any = _processor(unspellable_proto(content, in_text), file) if in_text else processor

    def vocab(self) -> dict[str, int]:
        return self._vocab

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._plain_text(ids) for ids in self._processor.encode(list(texts), num_threads=1)]

    def decode(self, ids: Sequence[int]) -> str:
        return self._processor.decode(self._plain([int(index) for index in ids]))


def _processor(content: bytes, file: Path) -> Any:
    import sentencepiece

    try:
        return sentencepiece.SentencePieceProcessor(model_proto=content)
    except RuntimeError:
        raise BadTokenizerError(f"{file} is no SentencePiece model") from None


class _HuggingFace(_Marked):
    """A tokenizer of the `tokenizers` library."""

    def __init__(self, backend: Any, files: tuple[Path, ...], given: str, marks: MarkChoice):
        self.path = given
        self.files = files
        self._vocab: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        if not self._vocab:
            raise BadTokenizerError(f"{files[0]} has an empty vocabulary")
        self.vocab_size = max(self._vocab.values()) + 1  # ids may have gaps
        self._find_marks(self._vocab, files[0].parent, marks, (None, None))
        if self.mark_ids:
            backend = _unspellable({mark.text: mark.id for mark in (self.eos, self.bos) if mark}, backend, files[0])
        backend.encode_special_tokens = True  # spelled-out control tokens are text
        backend.no_truncation()  # what a fine-tuning recipe saved would cut documents
        backend.no_padding()
        if getattr(backend.model, "dropout", None):
            backend.model.dropout = None  # what makes a text's ids differ from call to call
        self._backend = backend

    def vocab(self) -> dict[str, int]:
        return self._vocab

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        encodings = self._backend.encode_batch(list(texts), add_special_tokens=False)
        return [self._plain_text(encoding.ids) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode(self._plain([int(index) for index in ids]), skip_special_tokens=True)


def _unspellable(marks: dict[str, int], backend: Any, file: Path) -> Any:
    """The same tokenizer, without text that yields one of `marks`."""
    import tokenizers

    content, names = unspellable_json(backend.to_str(), marks)
    changed = tokenizers.Tokenizer.from_str(content)
    if any(changed.token_to_id(names[token]) != index for token, index in marks.items()):
        raise BadTokenizerError(f"{file} must give every token one id; {', '.join(marks)} has several")
    return changed


def _load_tokenizer_json(file: Path, given: str, marks: MarkChoice) -> Tokenizer:
    import tokenizers

    content = read_content(file)
    try:
        backend = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises plain Exception
        raise BadTokenizerError(f"{file} is no Hugging Face tokenizer.json: {error}") from None
    return _HuggingFace(backend, (file,), given, marks)


def _load_gpt2(vocab_file: Path, merges_file: Path, given: str, marks: MarkChoice) -> Tokenizer:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    vocab, merges = read_vocab(vocab_file), read_merges(merges_file)
    try:
        model = models.BPE(vocab=vocab, merges=merges)
    except Exception as error:  # the library raises plain Exception
        raise BadTokenizerError(f"{merges_file} does not match {vocab_file}: {error}") from None
    check_all_made(vocab, merges, (vocab_file, merges_file))
    missing = sum(symbol not in vocab for symbol in pre_tokenizers.ByteLevel.alphabet())
    if missing:
        _LOG.warning("%s lacks %d of the 256 byte symbols; text that needs them loses them", vocab_file, missing)
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([name for name in EOS.names if name in vocab])  # marks them; their ids stay
    return _HuggingFace(backend, (vocab_file, merges_file), given, marks)
