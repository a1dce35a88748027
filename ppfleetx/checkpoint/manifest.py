"""What a checkpoint's folder must hold: `manifest.json`, the file written last. Imports no Paddle.

One tensor of the run (a parameter, or a slot of the optimizer for it) is the union of its *entries*, each a region of it in
one file. The manifest carries its own checksum, and those of all other files.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Collection
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from crc32c import crc32c

from ppfleetx.checkpoint.files import FileSum, sum_file
from ppfleetx.checkpoint.regions import Box, Region, lengths
from ppfleetx.checkpoint.shards import DTYPES, Damaged

MANIFEST = "manifest.json"
FORMAT = "ppfleetx-2"


@dataclass(frozen=True)
class Entry:
    """A region of a tensor, in one file.

    Attributes:
        name: logical name of the parameter.
        slot: what of it: "" the weight, or moment1, … of the optimizer.
        shape: global shape of the tensor, without padding.
        dtype: F32, BF16, …
        box: (start, stop) of each dim.
        flat: a run of the box in row-major order; None: all of it.
        file: the shard file.
    """

    name: str
    slot: str
    shape: tuple[int, ...]
    dtype: str
    box: Box
    flat: tuple[int, int] | None
    file: str

    @property
    def key(self) -> str:
        """Its name in the file."""
        return f"{self.name}.{self.slot}" if self.slot else self.name

    @property
    def region(self) -> Region:
        """Box and run."""
        return Region(self.box, self.flat)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Its shape in the file."""
        return lengths(self.box) if self.flat is None else (self.region.size,)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Entry:
        """The inverse of `asdict`, after JSON has made lists of tuples. ValueError: it says what no tensor can be."""
        box = tuple((start, stop) for start, stop in value["box"])
        flat = None if value["flat"] is None else (value["flat"][0], value["flat"][1])
        entry = cls(**{**value, "shape": tuple(value["shape"]), "box": box, "flat": flat})
        if not entry._is_possible():
            raise ValueError(f"impossible entry {json.dumps(value)}")
        return entry

    def _is_possible(self) -> bool:
        """Whether the region lies in the tensor, and the type is one that we read."""
        texts = (self.name, self.slot, self.file)
        numbers = (*self.shape, *(edge for edges in self.box for edge in edges), *(self.flat or ()))
        if not (all(isinstance(text, str) for text in texts) and all(type(number) is int for number in numbers)):
            return False
        edges = zip(self.box, self.shape, strict=True)
        inside = all(0 <= start <= stop <= length for (start, stop), length in edges)
        start, stop = self.region.run
        return inside and 0 <= start <= stop <= prod(lengths(self.box)) and self.dtype in DTYPES


@dataclass(frozen=True)
class Manifest:
    """What is in a checkpoint.

    Attributes:
        files: name to size and checksum of every other file.
        entries: where tensors are.
        progress: step, consumed samples, scaler and the like (JSON values).
        run: what wrote it: layout, resolved config, versions (JSON values).
    """

    files: dict[str, FileSum]
    entries: list[Entry]
    progress: dict[str, Any]
    run: dict[str, Any]

    def to_text(self) -> str:
        """JSON, one file or entry a line."""
        body = {
            "progress": self.progress,
            "run": self.run,
            "files": {name: summed._asdict() for name, summed in self.files.items()},
            "entries": [asdict(entry) for entry in self.entries],
        }
        members = {"format": FORMAT, "crc32c": _checksum(json.loads(json.dumps(body))), **body}
        return "{\n" + ",\n".join(f"{json.dumps(key)}: {_lines(value)}" for key, value in members.items()) + "\n}\n"

    @classmethod
    def from_text(cls, text: str) -> Manifest:
        """The inverse.

        Raises:
            Damaged: it is not what `to_text` gave.
        """
        try:
            value = json.loads(text)
            if (found := value.pop("format")) != FORMAT:
                raise Damaged(f"its format is {found}; this version reads {FORMAT}")
            if value.pop("crc32c") != _checksum(value):
                raise Damaged("its checksum is wrong")
            files = {name: FileSum(**summed) for name, summed in value["files"].items()}
            entries = [Entry.from_json(entry) for entry in value["entries"]]
            _check_members(files, entries, value["progress"], value["run"])
            return cls(files, entries, value["progress"], value["run"])
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise Damaged(f"{type(error).__name__}: {error}") from None


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint folder `path`.

    Raises:
        Damaged: there is none, or it cannot be used.
    """
    try:
        return Manifest.from_text((path / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, Damaged) as error:
        raise Damaged(f"{MANIFEST} cannot be read: {error}") from None


def missing(path: Path) -> str | None:
    """Why there is no complete checkpoint at `path`, by names, sizes and what the manifest says; None if there is one."""
    try:
        if not path.is_dir():
            return "it is a file, and a checkpoint is a folder" if path.exists() else "there is no such folder"
        if not (path / MANIFEST).is_file():
            return f"there is no complete checkpoint here: {MANIFEST} is missing"
        manifest = read_manifest(path)
        faults = (_size_fault(path / name, summed) for name, summed in manifest.files.items())
        return next(filter(None, faults), None) or uncovered(manifest.entries)
    except Damaged as error:
        return str(error)
    except OSError as error:
        return f"it cannot be read: {error.strerror}"


def verify(path: Path, names: Collection[str] | None = None) -> list[str]:
    """Reads files in full and says what is wrong with each: missing, truncated, changed. Empty: all is well.

    Args:
        path: the checkpoint's folder.
        names: the files to look at; None: all. The manifest always is.
    """
    try:
        files = read_manifest(path).files
    except Damaged as error:
        return [str(error)]
    chosen = [(path / name, summed) for name, summed in files.items() if names is None or name in names]
    return [fault for file, summed in chosen if (fault := _fault(file, summed))]


def uncovered(entries: Collection[Entry]) -> str | None:
    """The first tensor whose entries do not make it up, with the numbers; None if all do. A copy of one counts once."""
    found: dict[tuple[str, tuple[int, ...], str], set[Region]] = defaultdict(set)
    for entry in entries:
        found[entry.key, entry.shape, entry.dtype].add(entry.region)
    for (key, shape, _), regions in found.items():
        count = sum(region.size for region in regions)
        if count != Region(tuple((0, length) for length in shape)).size:
            return f"{key} of shape {list(shape)} has {count} elements in the files"
        if _overlap(regions):
            return f"{key} has elements that are twice in the files, so others are missing"
    return None


def _overlap(regions: Collection[Region]) -> bool:
    """Whether different regions of one tensor have an element in common."""
    runs: dict[Box, list[tuple[int, int]]] = defaultdict(list)
    for region in regions:
        runs[region.box].append(region.run)
    for ordered in map(sorted, runs.values()):
        if any(a[1] > b[0] for a, b in itertools.pairwise(ordered)):
            return True
    return any(
        all(max(p[0], q[0]) < min(p[1], q[1]) for p, q in zip(a, b, strict=True))
        for a, b in itertools.combinations(runs, 2)
    )


def _fault(path: Path, summed: FileSum) -> str | None:
    """What is wrong with a file, by its content."""
    if (fault := _size_fault(path, summed)) is not None:
        return fault
    try:
        found = sum_file(path)
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror}"
    return None if found == summed else f"{path.name} was changed: its checksum is {found.crc32c}, not {summed.crc32c}"


def _size_fault(path: Path, summed: FileSum) -> str | None:
    """What is wrong with a file, by its size."""
    if not path.is_file():
        return f"{path.name} is missing"
    if (found := path.stat().st_size) != summed.size:
        return f"{path.name} has {found} bytes instead of {summed.size}"
    return None


def _check_members(files: dict[str, FileSum], entries: list[Entry], progress: Any, run: Any) -> None:
    """ValueError if they are not of the form that `Manifest` tells: a checksum can be right for anything."""
    for name, summed in files.items():
        if name in ("", ".", "..") or "/" in name or "\0" in name:  # nothing outside the folder is read
            raise ValueError(f"a file of another folder, {name!r}")
        if type(summed.size) is not int or not isinstance(summed.crc32c, str):
            raise ValueError(f"no size and checksum of {name}")
    if strange := {entry.file for entry in entries} - files.keys():
        raise ValueError(f"no size and checksum of {min(strange)}")
    layout, config = run.get("layout") or {}, run.get("config") or {}
    sections = [run.get("versions") or {}, *(config.get(name) or {} for name in ("Model", "Distributed"))]
    if not all(isinstance(one, dict) for one in (progress, *sections)):
        raise ValueError("progress or run are not what they should be")
    if any(type(degree) is not int for degree in layout.values()):
        raise ValueError("progress or run are not what they should be")


def _checksum(body: Any) -> str:
    """Of a JSON value, however it is printed."""
    return f"{crc32c(json.dumps(body, sort_keys=True).encode()):08x}"


def _lines(value: Any) -> str:
    """JSON with one member of `value` a line."""
    if isinstance(value, dict):
        return "{\n" + ",\n".join(f" {json.dumps(key)}: {json.dumps(item)}" for key, item in value.items()) + "\n}"
    if isinstance(value, list):
        return "[\n" + ",\n".join(f" {json.dumps(item)}" for item in value) + "\n]"
    return json.dumps(value)
