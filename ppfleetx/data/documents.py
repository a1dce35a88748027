"""Text documents from plain text and JSON lines, in the order of the files.

Files ending in .json or .jsonl hold one JSON object a line; every other file is plain text. Either may be
compressed (.gz). Text must be UTF-8 (a byte order mark at the start is dropped) and is kept as it is, line ends
included.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from ppfleetx.config.errors import Problem, UserError
from ppfleetx.data.token_files import FORMATS, META_SUFFIX

_LOG = logging.getLogger("ppfleetx")

#: files of a folder that are taken, unless the caller names others; each also with .gz after it
DEFAULT_SUFFIXES = (".txt", ".jsonl", ".json", ".md", ".rst", ".py")


def find_files(inputs: Sequence[str | Path], suffixes: Sequence[str] = DEFAULT_SUFFIXES) -> list[Path]:
    """Files named, and files below folders named that end in one of `suffixes`, sorted within a folder.

    Links are followed. Files and folders whose name begins with a dot are left out of folders, and so are sidecars of
    token corpora. Warns of other files that are left out of a folder, and of a file that comes twice.

    Raises:
        UserError: a path does not exist, or a folder holds no such file or cannot be read.
    """
    endings = tuple(suffixes) + tuple(f"{suffix}.gz" for suffix in suffixes)
    files: list[Path] = []
    for place in map(Path, inputs):
        if place.is_dir():
            below = sorted(_files_below(place))
            found = [path for path in below if path.name.endswith(endings) and not _is_sidecar(path)]
            _warn_left_out(place, [path for path in below if not path.name.endswith(endings)], suffixes)
            if not found:
                rule = f"the folder must hold files ending in {', '.join(suffixes)} (or these and .gz)"
                raise UserError(Problem("--input", str(place), rule, "name other endings with --suffix"))
            files += found
        elif place.exists():
            files.append(place)
        else:
            raise UserError(Problem("--input", str(place), "no such file or folder"))
    _warn_twice(files)
    return files


def _files_below(folder: Path) -> Iterator[Path]:
    """Files of a folder and of those below it, each folder once however many links lead to it; links to nothing, too."""

    def fail(error: OSError) -> NoReturn:
        raise UserError(Problem("--input", str(error.filename), f"the folder must be readable: {error.strerror}"))

    seen = set()
    for root, folders, names in os.walk(folder, followlinks=True, onerror=fail):
        status = os.stat(root)
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths = (Path(root, name) for name in names if not name.startswith("."))
        yield from (path for path in paths if path.is_file() or not path.exists())


def _is_sidecar(path: Path) -> bool:
    """Whether a file is the X_meta.json of a token corpus, which may lie among the texts that it was made from."""
    prefix = path.with_name(path.name.removesuffix(META_SUFFIX))
    return prefix != path and any(file_format.index_path(prefix).exists() for file_format in FORMATS.values())


def _warn_left_out(folder: Path, files: Sequence[Path], suffixes: Sequence[str]) -> None:
    if files:
        endings = Counter(path.suffix or "none" for path in files).most_common(5)
        told = ", ".join(f"{ending}: {count}" for ending, count in endings)
        _LOG.warning("%s: %d files are left out, not ending in %s (%s)", folder, len(files), " ".join(suffixes), told)


def _warn_twice(files: Sequence[Path]) -> None:
    twice = [path for path, count in Counter(map(os.path.realpath, files)).items() if count > 1]
    if twice:
        _LOG.warning(
            "--input names %d files more than once, and they are read as often; first: %s", len(twice), twice[0]
        )


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
            where = f"{file} line {_first_bad_line(opened, file)}"
            rule = f"text must be UTF-8; byte {error.object[error.start]:#04x}: {error.reason}"
            fix = "convert it to UTF-8; of compressed files only .gz is read"
            raise UserError(Problem("--input", where, rule, fix)) from None
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(Problem("--input", str(file), f"the file must be readable: {error}")) from None


def _first_bad_line(opened: Callable[..., Any], file: Path) -> int:
    """The first line that is not UTF-8, from 1."""
    with opened(file, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    return number


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
    except (ValueError, RecursionError) as error:  # malformed JSON or UTF-8; brackets nested too deep
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
