"""Tokenizers: SentencePiece models, Hugging Face `tokenizer.json`, GPT-2 folders with `vocab.json` and `merges.txt`, bytes.

Text that spells a control token, such as "</s>" or "<|endoftext|>", is encoded as ordinary text by all of them: no
document can end itself. No token is added before or after a text either; ends of documents are the caller's to add.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from ppfleetx.config.errors import Problem, UserError

_LOG = logging.getLogger("ppfleetx")

#: names by which a vocabulary's end-of-document token is found, in this order
EOS_NAMES = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "[EOS]")

#: name of the tokenizer that needs no file
BYTES = "bytes"

#: share of vocabulary entries that no merge makes, above which merges.txt is taken for damaged
_MAX_UNMADE_SHARE = 0.01


class Tokenizer(Protocol):
    """What the data room asks of a tokenizer.

    Attributes:
        path: path as the user gave it.
        files: the files it was read from.
        vocab_size: all ids lie in [0, vocab_size).
        eos_id: end-of-document id; None if the vocabulary has none of EOS_NAMES.
    """

    path: str
    files: tuple[Path, ...]
    vocab_size: int
    eos_id: int | None

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text; an empty text gives an empty list."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; control tokens give none."""


def load_tokenizer(path: str | Path, key: str = "--tokenizer") -> Tokenizer:
    """Load a tokenizer: a SentencePiece `.model`, a `tokenizer.json`, a folder, or the word `bytes`.

    In a folder the first of these counts: `tokenizer.json`, `tokenizer.model`, `vocab.json` with `merges.txt`.

    Args:
        key: YAML key or option to name in errors.

    Raises:
        UserError: a file is missing, empty or malformed, or merges do not match the vocabulary.
    """
    if str(path) == BYTES:
        return _Bytes()
    place = Path(path).expanduser()
    try:
        return _load(place, str(path))
    except _BadTokenizer as bad:
        raise UserError(Problem(key, str(path), str(bad))) from None


def fingerprint(tokenizer: Tokenizer) -> str:
    """sha256 over the tokenizer's files, hexadecimal."""
    digest = hashlib.sha256()
    for file in tokenizer.files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


class _BadTokenizer(Exception):
    """A tokenizer file that cannot be used, and why."""


def _load(place: Path, given: str) -> Tokenizer:
    if place.is_dir():
        for name in ("tokenizer.json", "tokenizer.model"):
            if (place / name).is_file():
                return _load(place / name, given)
        if not any((place / name).is_file() for name in ("vocab.json", "merges.txt")):
            raise _BadTokenizer(f"{place} must hold tokenizer.json, tokenizer.model, or vocab.json and merges.txt")
        return _load_gpt2(place / "vocab.json", place / "merges.txt", given)
    if place.name in ("vocab.json", "merges.txt"):
        return _load_gpt2(place.with_name("vocab.json"), place.with_name("merges.txt"), given)
    if place.suffix == ".json":
        return _load_tokenizer_json(place, given)
    return _SentencePiece(place, given)


class _Bytes:
    """The bytes of UTF-8 as ids; 0, which no text holds, ends a document. For tests and first steps: nothing to train."""

    path = BYTES
    files: tuple[Path, ...] = ()
    vocab_size = 256
    eos_id: int | None = 0

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.replace("\0", "").encode()) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(index for index in ids if index).decode(errors="replace")


class _SentencePiece:
    """A SentencePiece model. U+2581, its mark for a space, decodes to a space."""

    def __init__(self, file: Path, given: str):
        import sentencepiece

        content = _read(file)
        try:
            self._processor: Any = sentencepiece.SentencePieceProcessor(model_proto=content)
        except RuntimeError:
            raise _BadTokenizer(f"{file} is no SentencePiece model") from None
        self.path = given
        self.files: tuple[Path, ...] = (file,)
        self.vocab_size = int(self._processor.vocab_size())
        self.eos_id: int | None = int(self._processor.eos_id())
        if self.eos_id < 0:
            pieces = {self._processor.id_to_piece(index): index for index in range(self.vocab_size)}
            self.eos_id = _find_eos(pieces)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._processor.encode(list(texts), num_threads=1)

    def decode(self, ids: Sequence[int]) -> str:
        return self._processor.decode([int(index) for index in ids])


class _HuggingFace:
    """A tokenizer of the `tokenizers` library."""

    def __init__(self, backend: Any, files: tuple[Path, ...], given: str):
        backend.encode_special_tokens = True  # spelled-out control tokens are text
        self._backend = backend
        self.path = given
        self.files = files
        vocab: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        if not vocab:
            raise _BadTokenizer(f"{files[0]} has an empty vocabulary")
        self.vocab_size = max(vocab.values()) + 1  # ids may have gaps
        self.eos_id = _find_eos(vocab)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._backend.encode_batch(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode([int(index) for index in ids], skip_special_tokens=True)


def _load_tokenizer_json(file: Path, given: str) -> Tokenizer:
    import tokenizers

    content = _read(file)
    try:
        backend = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises plain Exception
        raise _BadTokenizer(f"{file} is no Hugging Face tokenizer.json: {error}") from None
    backend.no_truncation()  # what a fine-tuning recipe saved would cut documents
    backend.no_padding()
    if getattr(backend.model, "dropout", None):
        backend.model.dropout = None  # what makes a text's ids differ from call to call
    return _HuggingFace(backend, (file,), given)


def _load_gpt2(vocab_file: Path, merges_file: Path, given: str) -> Tokenizer:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    vocab, merges = _read_vocab(vocab_file), _read_merges(merges_file)
    try:
        model = models.BPE(vocab=vocab, merges=merges)
    except Exception as error:  # the library raises plain Exception
        raise _BadTokenizer(f"{merges_file} does not match {vocab_file}: {error}") from None
    _check_all_made(vocab, merges, (vocab_file, merges_file))
    missing = sum(symbol not in vocab for symbol in pre_tokenizers.ByteLevel.alphabet())
    if missing:
        _LOG.warning("%s lacks %d of the 256 byte symbols; text that needs them loses them", vocab_file, missing)
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([name for name in EOS_NAMES if name in vocab])  # marks them; their ids stay
    return _HuggingFace(backend, (vocab_file, merges_file), given)


def _read_vocab(file: Path) -> dict[str, int]:
    try:
        vocab = json.loads(_read(file))
    except (ValueError, RecursionError) as error:
        raise _BadTokenizer(f"{file} is no JSON: {error}") from None
    if not isinstance(vocab, dict) or not vocab or any(type(index) is not int or index < 0 for index in vocab.values()):
        raise _BadTokenizer(f"{file} must map tokens to ids, at least one")
    return vocab


def _read_merges(file: Path) -> list[tuple[str, str]]:
    try:
        lines = _read(file).decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise _BadTokenizer(f"{file} is not UTF-8: {error}") from None
    merges = []
    for number, line in enumerate(lines, start=1):
        parts = line.rstrip("\r").split(" ")
        if parts == [""] or (number == 1 and line.startswith("#version")):
            continue
        if len(parts) != 2:
            raise _BadTokenizer(f"{file} line {number} must be two tokens with a space between: {line[:80]!r}")
        merges.append((parts[0], parts[1]))
    return merges


def _check_all_made(vocab: dict[str, int], merges: Iterable[tuple[str, str]], files: tuple[Path, Path]) -> None:
    """Refuse merges that are only a part of what the vocabulary was built with (a download that broke off)."""
    made = {left + right for left, right in merges}
    unmade = [
        token for token in vocab if len(token) > 1 and token not in made and not re.fullmatch(r"<.*>|\[.*\]", token)
    ]
    if len(unmade) > _MAX_UNMADE_SHARE * len(vocab):
        vocab_file, merges_file = files
        raise _BadTokenizer(
            f"{merges_file} does not match {vocab_file}: {len(unmade)} of {len(vocab)} tokens are made by no merge,"
            f" such as {unmade[0]!r}"
        )


def _read(file: Path) -> bytes:
    """The content of a tokenizer file, which must not be empty."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise _BadTokenizer(f"{file} cannot be read: {error.strerror}") from None
    if not content.strip():
        raise _BadTokenizer(f"{file} is empty ({len(content)} bytes); fetch or make it again")
    return content


def _find_eos(vocab: dict[str, int]) -> int | None:
    return next((vocab[name] for name in EOS_NAMES if name in vocab), None)
