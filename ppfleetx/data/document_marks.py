"""Which tokens end and begin documents: named by the user, by the tokenizer's own files, or guessed by name.

The files of a Hugging Face tokenizer lie beside it: `tokenizer_config.json` (`eos_token`), `config.json` and
`generation_config.json` (`eos_token_id`), `special_tokens_map.json` (`eos_token`); the first that names the token counts. An
instruct model's `<|im_end|>` is found there, where a list of usual names would take another token or none.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ppfleetx.config.errors import Problem, UserError
from ppfleetx.data.tokenizer_files import BadTokenizerError


class Mark(NamedTuple):
    """The token that ends (or begins) documents.

    Attributes:
        text: what it is called in the vocabulary.
        id: its id.
        source: what named it: an option, a file, or "guessed by its name".
    """

    text: str
    id: int
    source: str

    @property
    def guessed(self) -> bool:
        return self.source == GUESSED


#: `Mark.source` of a token that nothing but its name tells
GUESSED = "guessed by its name"


@dataclass(frozen=True)
class MarkKind:
    """The end or the beginning of documents: key in Hugging Face's files, option that names it, names to guess in order."""

    key: str
    option: str
    title: str
    names: tuple[str, ...]


EOS = MarkKind(
    "eos_token",
    "--eos-token",
    "end-of-document",
    ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "[EOS]", "<|im_end|>"),
)
BOS = MarkKind(
    "bos_token", "--bos-token", "begin-of-document", ("<s>", "<|begin_of_text|>", "<|startoftext|>", "<bos>", "[BOS]")
)


def find_mark(
    kind: MarkKind, vocab: Mapping[str, int], folder: Path | None, named: str | None, own: Mark | None
) -> Mark | None:
    """The token that ends or begins documents; None if nothing tells.

    Args:
        kind: EOS or BOS.
        vocab: token to id.
        folder: where the tokenizer's further files may lie; None: there are none.
        named: the token that the user named.
        own: what the tokenizer's own file says, which counts more than `config.json`; None if it says nothing.

    Raises:
        UserError: the named token is not in the vocabulary.
        BadTokenizerError: a file is malformed, or names a token that is not in the vocabulary.
    """
    if named is not None:
        if named not in vocab:
            raise UserError(_unknown(kind, named, vocab))
        return Mark(named, vocab[named], kind.option)
    if folder and (mark := _token_in(folder / "tokenizer_config.json", kind, vocab)):
        return mark
    if own:
        return own
    for mark in _further_files(kind, vocab, folder) if folder else ():
        return mark
    return next((Mark(name, vocab[name], GUESSED) for name in kind.names if name in vocab), None)


def missing(kind: MarkKind, option: str, tokenizer: str, vocab: Mapping[str, int]) -> UserError:
    """What `option` says where the tokenizer has no such token."""
    rule = (
        f"the tokenizer {tokenizer} must have an {kind.title} token, and neither its files nor a usual name tells one"
    )
    special = [token for token in sorted(vocab, key=vocab.__getitem__) if _looks_special(token)][-5:]
    fix = f"name it with {kind.option} TOKEN" + (f"; perhaps one of {', '.join(special)}" if special else "")
    return UserError(Problem(option, True, rule, fix))


def _unknown(kind: MarkKind, named: str, vocab: Mapping[str, int]) -> Problem:
    alike = [token for token in sorted(vocab) if abs(len(token) - len(named)) <= 3 or _looks_special(token)]
    near = difflib.get_close_matches(named, alike, n=3, cutoff=0.5)
    fix = f"did you mean {' or '.join(near)}?" if near else ""
    return Problem(kind.option, named, f"it must be a token of the tokenizer, which has {len(vocab)} others", fix)


def _looks_special(token: str) -> bool:
    return len(token) > 2 and (token[0], token[-1]) in (("<", ">"), ("[", "]")) and not token.startswith("<0x")


def _further_files(kind: MarkKind, vocab: Mapping[str, int], folder: Path) -> Iterator[Mark]:
    """What the files after `tokenizer_config.json` name, in their order."""
    tokens = {index: token for token, index in vocab.items()}
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        index = _read_object(path, kind).get(f"{kind.key}_id")
        if isinstance(index, list) and index:
            index = index[0]
        if index is None:
            continue
        if type(index) is not int:
            raise _bad(path, kind, f"{kind.key}_id must be an id or a list of them, not {index!r}")
        if index not in tokens:
            raise _bad(path, kind, f"{kind.key}_id {index} is not in the tokenizer's vocabulary")
        yield Mark(tokens[index], index, name)
    if mark := _token_in(folder / "special_tokens_map.json", kind, vocab):
        yield mark


def _token_in(path: Path, kind: MarkKind, vocab: Mapping[str, int]) -> Mark | None:
    """The token that a file with `eos_token` as text, or as an object with a `content`, names."""
    token = _read_object(path, kind).get(kind.key)
    if isinstance(token, dict):
        token = token.get("content", token)
    if token is None:
        return None
    if not isinstance(token, str):
        raise _bad(path, kind, f"{kind.key} must be a token, not {token!r}")
    if token not in vocab:
        raise _bad(path, kind, f"{kind.key} {token!r} is not in the tokenizer's vocabulary")
    return Mark(token, vocab[token], path.name)


def _read_object(path: Path, kind: MarkKind) -> dict[str, Any]:
    """The JSON object of a file; an empty one if the file is not there."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise BadTokenizerError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise _bad(path, kind, f"it is no JSON: {error}") from None
    if not isinstance(content, dict):
        raise _bad(path, kind, f"it must hold an object, not {type(content).__name__}")
    return content


def _bad(path: Path, kind: MarkKind, rule: str) -> BadTokenizerError:
    return BadTokenizerError(f"{path}: {rule}", f"mend the file, or name the token with {kind.option}")
