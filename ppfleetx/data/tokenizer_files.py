"""Reading the files of a tokenizer: what must hold of them, and what a broken download says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from ppfleetx.data.errors import BadInputError

#: share of vocabulary entries that no merge makes, above which merges.txt is taken for damaged
_MAX_UNMADE_SHARE = 0.01


class BadTokenizerError(BadInputError):
    """A tokenizer's file that cannot be used. `load_tokenizer` turns it into a UserError."""


def read_content(file: Path) -> bytes:
    """The content of a tokenizer file, which must not be empty."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise BadTokenizerError(f"{file} cannot be read: {error.strerror}") from None
    if not content.strip():
        raise BadTokenizerError(f"{file} is empty ({len(content)} bytes); fetch or make it again")
    return content


def read_vocab(file: Path) -> dict[str, int]:
    """GPT-2's vocab.json: token to id."""
    try:
        vocab = json.loads(read_content(file))
    except (ValueError, RecursionError) as error:
        raise BadTokenizerError(f"{file} is no JSON: {error}") from None
    if not isinstance(vocab, dict) or not vocab or any(type(index) is not int or index < 0 for index in vocab.values()):
        raise BadTokenizerError(f"{file} must map tokens to ids, at least one")
    return vocab


def read_merges(file: Path) -> list[tuple[str, str]]:
    """GPT-2's merges.txt: pairs of tokens, the first to be merged first."""
    try:
        lines = read_content(file).decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise BadTokenizerError(f"{file} is not UTF-8: {error}") from None
    merges = []
    for number, line in enumerate(lines, start=1):
        parts = line.rstrip("\r").split(" ")
        if parts == [""] or (number == 1 and line.startswith("#version")):
            continue
        if len(parts) != 2:
            raise BadTokenizerError(f"{file} line {number} must be two tokens with a space between: {line[:80]!r}")
        merges.append((parts[0], parts[1]))
    return merges


def check_all_made(vocab: dict[str, int], merges: Iterable[tuple[str, str]], files: tuple[Path, Path]) -> None:
    """Refuse merges that are only a part of what the vocabulary was built with (a download that broke off)."""
    made = {left + right for left, right in merges}
    unmade = [
        token for token in vocab if len(token) > 1 and token not in made and not re.fullmatch(r"<.*>|\[.*\]", token)
    ]
    if len(unmade) > _MAX_UNMADE_SHARE * len(vocab):
        vocab_file, merges_file = files
        raise BadTokenizerError(
            f"{merges_file} does not match {vocab_file}: {len(unmade)} of {len(vocab)} tokens are made by no merge,"
            f" such as {unmade[0]!r}"
        )
