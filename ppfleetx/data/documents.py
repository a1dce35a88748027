"""Text documents from plain text and JSON lines, in the order of the files.

Files ending in .json or .jsonl hold one JSON object a line; every other file is plain text. Either may be
compressed (.gz). Text must be UTF-8 (a byte order mark at the start is dropped) and is kept as it is, line ends
included.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from ppfleetx.config.errors import Problem, UserError

#: files of a folder that are taken, unless the caller names others; each also with .gz after it
DEFAULT_SUFFIXES = (".txt", ".jsonl", ".json", ".md", ".rst", ".py")


def find_files(inputs: Sequence[str | Path], suffixes: Sequence[str] = DEFAULT_SUFFIXES) -> list[Path]:
    """Files named, and files below folders named that end in one of `suffixes`, sorted within a folder.

    Files and folders whose name begins with a dot are left out of folders.

    Raises:
        UserError: a path does not exist, or a folder holds no such file.
    """
    endings = tuple(suffixes) + tuple(f"{suffix}.gz" for suffix in suffixes)
    files: list[Path] = []
    for place in map(Path, inputs):
        if place.is_dir():
            below = (
                path.relative_to(place) for path in place.rglob("*") if path.name.endswith(endings) and path.is_file()
            )
            found = sorted(place / path for path in below if not any(part.startswith(".") for part in path.parts))
            if not found:
                rule = f"the folder must hold files ending in {', '.join(suffixes)} (or these and .gz)"
                raise UserError(Problem("--input", str(place), rule, "name other endings with --suffix"))
            files += found
        elif place.exists():
            files.append(place)
        else:
            raise UserError(Problem("--input", str(place), "no such file or folder"))
    return files


def read_documents(files: Iterable[Path], split_by: str = "file", json_key: str = "text") -> Iterator[str]:
    """Documents of all files, one after another, empty ones included.

    Args:
        files: paths of files.
        split_by: what a document of a plain text file is: "file", "line" (without its line end) or "blank-line" (lines
            between blank lines, joined by a newline).
        json_key: key of the text in JSON lines.

    Raises:
        UserError: a file cannot be read or is not UTF-8; a JSON line is malformed or lacks the key.
    """
    for file in files:
        opened: Callable[..., Any] = gzip.open if file.suffix == ".gz" else open
        kind = file.with_suffix("").suffix if file.suffix == ".gz" else file.suffix
        try:
            if kind in (".json", ".jsonl"):
                with opened(file, "rb") as lines:
                    yield from _json_documents(lines, file, json_key)
            else:
                with opened(file, "rt", encoding="utf-8-sig", newline="" if split_by == "file" else None) as text:
                    yield from _SPLITTERS[split_by](text)
        except UnicodeDecodeError as error:
            rule = f"text must be UTF-8; byte {error.object[error.start]:#04x}: {error.reason}"
            raise UserError(Problem("--input", str(file), rule)) from None
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(Problem("--input", str(file), f"the file must be readable: {error}")) from None


def _whole(text: IO[str]) -> Iterator[str]:
    yield text.read()


def _lines(text: IO[str]) -> Iterator[str]:
    for line in text:
        yield line.removesuffix("\n")


def _paragraphs(text: IO[str]) -> Iterator[str]:
    paragraph: list[str] = []
    for line in _lines(text):
        if line.strip():
            paragraph.append(line)
        elif paragraph:
            yield "\n".join(paragraph)
            paragraph = []
    if paragraph:
        yield "\n".join(paragraph)


_SPLITTERS: dict[str, Callable[[IO[str]], Iterator[str]]] = {"file": _whole, "line": _lines, "blank-line": _paragraphs}

#: values of `split_by`
SPLIT_BY = tuple(_SPLITTERS)


def _json_documents(lines: IO[bytes], file: Path, json_key: str) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield _json_text(line, f"{file} line {number}", json_key)


def _json_text(line: bytes, where: str, json_key: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:  # malformed JSON or malformed UTF-8
        raise UserError(Problem("--input", where, f"every line must be one JSON object: {error}")) from None
    if not isinstance(record, dict):
        raise UserError(Problem("--input", where, f"every line must be one JSON object, not {type(record).__name__}"))
    if json_key not in record:
        rule = f"every line must have the key {json_key!r}; it has {', '.join(map(repr, record)) or 'none'}"
        raise UserError(Problem("--input", where, rule, "name another with --json-key"))
    text = record[json_key]
    if not isinstance(text, str):
        raise UserError(Problem("--input", where, f"{json_key!r} must be text, not {type(text).__name__}"))
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can spell half of a surrogate pair
        raise UserError(Problem("--input", where, f"{json_key!r} must be text that UTF-8 can write")) from None
    return text
