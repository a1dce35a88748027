"""Text documents from plain text and JSON lines, in the order of the files.

Files ending in .json, .jsonl or .ndjson hold one JSON object a line; every other file is plain text, unless `Reading.kind`
says what all of them are. Any of them may be compressed (.gz). Upper and lower case of endings is the same. Text must be
UTF-8 (a byte order mark at the start is dropped) and is kept as it is, line ends included.
"""

from __future__ import annotations

import gzip
import io
import json
import logging
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn, cast

from ppfleetx.config.errors import Problem, UserError
from ppfleetx.data.token_files import FORMATS, META_SUFFIX

_LOG = logging.getLogger("ppfleetx")

_JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
#: files of a folder that are taken, unless the caller names others; each also with .gz after it
DEFAULT_SUFFIXES = (".txt", *_JSON_SUFFIXES, ".md", ".rst", ".py")

#: values of `Reading.kind`
KINDS = ("auto", "text", "json")

#: bytes of a text file's beginning that are looked at for JSON
_PEEK_BYTES = 1 << 16


@dataclass(frozen=True)
class Reading:
    """How files are read.

    Attributes:
        split_by: what a document of a plain text file is: "file", "line" (without its line end) or "blank-line" (lines
            between blank lines, joined by a newline).
        json_key: key of the text in JSON lines.
        kind: "text" or "json" (lines) for all files, whatever their names; "auto" goes by their endings.
        suffixes: endings of the files taken from folders.
    """

    split_by: str = "file"
    json_key: str = "text"
    kind: str = "auto"
    suffixes: Sequence[str] = DEFAULT_SUFFIXES


class Meter:
    """Counts the bytes that `read_documents` has read.

    Attributes:
        done: bytes so far, as they lie on the disk.
        total: bytes of all files; None if one of them is no regular file (a pipe).
    """

    def __init__(self, files: Sequence[Path]):
        self.done = 0
        sizes = [file.stat().st_size if file.is_file() else None for file in files]
        self.total = None if None in sizes else sum(cast("list[int]", sizes))


def find_files(inputs: Sequence[str | Path], suffixes: Sequence[str] = DEFAULT_SUFFIXES) -> list[Path]:
    """Files named, and files below folders named that end in one of `suffixes` in upper or lower case, sorted within a folder.

    Links are followed. Files and folders whose name begins with a dot are left out of folders, and so are sidecars of
    token corpora. Warns of other files that are left out of a folder, and of a file that comes twice.

    Raises:
        UserError: a path does not exist, or a folder holds no such file or cannot be read.
    """
    suffixes = [suffix.lower() for suffix in suffixes]
    endings = (*suffixes, *(f"{suffix}.gz" for suffix in suffixes))
    files: list[Path] = []
    for place in map(Path, inputs):
        if place.is_dir():
            below = sorted(_files_below(place))
            found = [path for path in below if path.name.lower().endswith(endings) and not _is_sidecar(path)]
            _warn_left_out(place, [path for path in below if not path.name.lower().endswith(endings)], suffixes)
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


def read_documents(files: Iterable[Path], reading: Reading | None = None, meter: Meter | None = None) -> Iterator[str]:
    """Documents of all files, one after another, empty ones included.

    Args:
        files: paths of files.
        reading: how; None for the defaults.
        meter: counts what is read.

    Raises:
        UserError: a file cannot be read or is not UTF-8; a JSON line is malformed or lacks the key.
    """
    reading = reading or Reading()
    for file in files:
        try:
            with _opened(file, meter) as content:
                if reading.kind == "json" or (reading.kind == "auto" and _kind_suffix(file) in _JSON_SUFFIXES):
                    yield from _json_documents(content, file, reading.json_key)
                else:
                    if reading.kind == "auto":
                        _warn_of_json(content, file)
                    newline = "" if reading.split_by == "file" else None
                    text = io.TextIOWrapper(cast("IO[bytes]", content), encoding="utf-8-sig", newline=newline)
                    yield from _SPLITTERS[reading.split_by](text)
        except UnicodeDecodeError as error:
            where = f"{file} line {_first_bad_line(file)}" if file.is_file() else str(file)
            rule = f"text must be UTF-8; byte {error.object[error.start]:#04x}: {error.reason}"
            fix = "convert it to UTF-8; of compressed files only .gz is read"
            raise UserError(Problem("--input", where, rule, fix)) from None
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(Problem("--input", str(file), f"the file must be readable: {error}")) from None


def _kind_suffix(file: Path) -> str:
    """The ending that says what a file holds, in lower case, that of compression aside."""
    return Path(file.name.lower().removesuffix(".gz")).suffix


class _MeteredFile(io.FileIO):
    """A file whose bytes a meter counts."""

    def __init__(self, file: Path, meter: Meter):
        super().__init__(file)
        self._meter = meter

    def readinto(self, buffer: Any) -> int | None:
        count = super().readinto(buffer)
        self._meter.done += count or 0
        return count

    def readall(self) -> bytes:
        content = super().readall()
        self._meter.done += len(content)
        return content


@contextmanager
def _opened(file: Path, meter: Meter | None = None) -> Iterator[io.BufferedReader[Any] | gzip.GzipFile]:
    """The content of a file as bytes, uncompressed."""
    with ExitStack() as stack:
        raw: io.RawIOBase = stack.enter_context(_MeteredFile(file, meter) if meter else io.FileIO(file))
        buffered = stack.enter_context(io.BufferedReader(raw, _PEEK_BYTES))
        yield stack.enter_context(gzip.GzipFile(fileobj=buffered)) if file.suffix.lower() == ".gz" else buffered


def _first_bad_line(file: Path) -> int:
    """The first line that is not UTF-8, from 1."""
    with _opened(file) as lines:
        for number, line in enumerate(lines, start=1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    return number


def _warn_of_json(content: io.BufferedReader[Any] | gzip.GzipFile, file: Path) -> None:
    """Says that a file which is read as text begins with a line of JSON."""
    line, newline, _ = content.peek(_PEEK_BYTES).partition(b"\n")
    if not line.lstrip().startswith(b"{"):
        return
    try:
        is_json = not newline or isinstance(json.loads(line), dict)  # one that is longer than what was looked at passes
    except (ValueError, RecursionError):
        return
    if is_json and line.lstrip()[1:].lstrip().startswith(b'"'):
        _LOG.warning(
            "%s is read as plain text, though it begins like JSON lines; --input-format json reads it as such", file
        )


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


def _json_documents(lines: Iterable[bytes], file: Path, json_key: str) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield _json_text(line, f"{file} line {number}", json_key)


#: where one array, or one object over several lines, is the whole file
_JSON_FIX = (
    "of an array, or of objects over several lines, make JSON lines: jq -c 'if type == \"array\" then .[] else . end'"
)


def _json_text(line: bytes, where: str, json_key: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # malformed JSON or UTF-8; brackets nested too deep
        fix = _JSON_FIX if line.lstrip()[:1] in (b"[", b"{") else ""
        raise UserError(Problem("--input", where, f"every line must be one JSON object: {error}", fix)) from None
    if not isinstance(record, dict):
        rule = f"every line must be one JSON object, not {type(record).__name__}"
        raise UserError(Problem("--input", where, rule, _JSON_FIX))
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
