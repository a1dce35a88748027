"""What people see of checkpoints: which there are, and what is in one. Imports no Paddle."""

from __future__ import annotations

import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ppfleetx.checkpoint.compare import setting
from ppfleetx.checkpoint.manifest import MANIFEST, Entry, Manifest, missing, read_manifest, uncovered, verify
from ppfleetx.checkpoint.reader import Checkpoint
from ppfleetx.checkpoint.shards import Damaged
from ppfleetx.checkpoint.stream import numbers, pieces, stored
from ppfleetx.config.errors import Problem, UserError

#: names of the folders that a run makes; those with a dot are being written or deleted, or were when it was killed
_STEP, _PASSING = re.compile(r"step_\d+"), re.compile(r"\.step_\d+.*")


class Row(NamedTuple):
    """A folder as `ls` shows it.

    Attributes:
        name: of the folder.
        step: updates done, or "-".
        state: "complete", or why not.
        size_bytes: of all its files.
        layout: that wrote it.
        saved: when, local time.
    """

    name: str
    step: str
    state: str
    size_bytes: int
    layout: str
    saved: str


def listing(folder: Path) -> list[Row]:
    """The checkpoints in an `output_dir`, oldest first, complete or not; or the one at `folder` itself.

    Raises:
        UserError: there is none.
    """
    rows = []
    for path in checkpoints_in(folder, passing=True):
        with suppress(FileNotFoundError):  # a run deletes old ones
            rows.append(_row(path))
    return rows


def checkpoints_in(path: Path, passing: bool = False) -> list[Path]:
    """The checkpoint at `path`, or those in it, whole or not.

    Args:
        passing: also folders that are being written or deleted.

    Raises:
        UserError: there is neither.
    """
    if not path.is_dir():
        rule = "it is a file, and a checkpoint is a folder" if path.exists() else "there is no such folder"
        raise UserError(Problem("PATH", str(path), rule))
    if (path / MANIFEST).exists() or _STEP.fullmatch(path.name):
        return [path]
    named = {child for child in path.iterdir() if _STEP.fullmatch(child.name) or _PASSING.fullmatch(child.name)}
    found = {*(child for child in named if child.is_dir()), *(file.parent for file in path.glob(f"*/{MANIFEST}"))}
    found = {child for child in found if passing or not child.name.startswith(".")}
    if not found:
        rule = f"it is no checkpoint (no {MANIFEST}) and holds none"
        raise UserError(Problem("PATH", str(path), rule, "name an output_dir, or a folder step_N in it"))
    return sorted(found, key=lambda child: child.name.lstrip("."))


def faults(path: Path) -> list[str]:
    """Everything that is wrong with a checkpoint: files that are missing, truncated or changed, tensors with gaps."""
    if found := verify(path):
        return found
    gap = uncovered(read_manifest(path).entries)
    return [] if gap is None else [gap]


def layout_name(config: Mapping[str, Any], degrees: Mapping[str, int]) -> str:
    """The layout string of a run: dp2mp2sp, sharding2s3, one process.

    Args:
        config: the resolved configuration, as a tree.
        degrees: of each axis.
    """
    stage = setting(config, "Distributed.sharding.sharding_stage") or ""
    names = [f"{axis}{n}{f's{stage}' if axis == 'sharding' else ''}" for axis, n in degrees.items() if n > 1]
    return "".join(names) + ("sp" if setting(config, "Model.sequence_parallel") else "") or "one process"


def readable(size_bytes: int) -> str:
    """A size for people, in decimal units."""
    power = min(int(math.log10(max(size_bytes, 1)) // 3), 4)
    number = size_bytes / 1000**power
    return f"{size_bytes} B" if power == 0 else f"{number:.1f} {'kMGT'[power - 1]}B"


def overview(saved: Checkpoint) -> list[str]:
    """Lines about a checkpoint: progress, what wrote it, its files, and each tensor with the slots stored for it."""
    manifest = saved.manifest
    return [
        str(saved.path),
        *(f"  {name:<17}{value}" for name, value in manifest.progress.items() if value != {}),
        f"  {'layout':<17}{written_by(manifest)}",
        *(f"  {name + ' version':<17}{value}" for name, value in manifest.run.get("versions", {}).items()),
        *([f"  {'source':<17}{manifest.run['source']}"] if "source" in manifest.run else []),
        f"  {'files':<17}{_files_line(manifest)}",
        f"  {'parameters':<17}{_parameters_line(saved)}",
        "",
        *table([("parameter", "shape", "dtype", "and"), *_tensor_rows(saved)]),
    ]


def statistics(saved: Checkpoint, key: str) -> list[str]:
    """Lines about the values of one tensor, which is read in pieces.

    Raises:
        UserError: there is none of this name; the nearest names are given.
    """
    entry = _entry(saved, key)
    count = total = squares = 0.0
    least, most = math.inf, -math.inf
    kinds: Counter[str] = Counter()
    for piece in pieces(saved, entry):
        values = numbers(piece, entry.dtype)
        finite = values[np.isfinite(values)]
        kinds["not a number"] += int(np.isnan(values).sum())
        kinds["infinite"] += int(np.isinf(values).sum())
        kinds["zero"] += int((values == 0).sum())
        if finite.size:
            with np.errstate(over="ignore"):  # of float64
                total, squares = total + float(finite.sum()), squares + float(finite @ finite)
            count += finite.size
            least, most = min(least, finite.min()), max(most, finite.max())
    mean = total / max(count, 1)
    parts = sum((other.name, other.slot) == (entry.name, entry.slot) for other in saved.manifest.entries)
    lines = [f"{key}: {entry.dtype} {list(entry.shape)}, stored in {parts} part{'s' if parts > 1 else ''}"]
    if count:
        deviation = math.sqrt(max(squares / count - mean * mean, 0.0))
        lines += [
            f"  least {least:.9g}, most {most:.9g}",
            f"  mean {mean:.9g}, standard deviation {deviation:.9g}, norm {math.sqrt(squares):.9g}",
        ]
    return [*lines, *(f"  {kind}: {number}" for kind, number in kinds.items() if number)]


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of texts, the first one the heads, in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _row(path: Path) -> Row:
    size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    if path.name.startswith("."):
        return Row(
            path.name, "-", "unfinished: being written or deleted, or left by a run that was killed", size, "-", "-"
        )
    why = missing(path)
    try:
        manifest = read_manifest(path)
    except Damaged:
        return Row(path.name, "-", f"incomplete: {why}", size, "-", "-")
    saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime((path / MANIFEST).stat().st_mtime))
    state = "complete" if why is None else f"damaged: {why}"
    return Row(path.name, str(manifest.progress.get("step", "-")), state, size, written_by(manifest), saved)


def written_by(manifest: Manifest) -> str:
    """The layout string of what wrote a checkpoint; or that it holds weights alone, which are of none."""
    if not manifest.progress:
        return "weights only"
    return layout_name(manifest.run.get("config") or {}, manifest.run.get("layout") or {})


def _files_line(manifest: Manifest) -> str:
    size = sum(summed.size for summed in manifest.files.values())
    shards = len({entry.file for entry in manifest.entries})
    return f"{len(manifest.files)} ({shards} with tensors), {readable(size)}"


def _parameters_line(saved: Checkpoint) -> str:
    shapes = saved.shapes()
    return f"{sum(map(math.prod, shapes.values())):,} in {len(shapes)} tensors"


def _tensor_rows(saved: Checkpoint) -> list[tuple[str, str, str, str]]:
    slots: dict[str, list[Entry]] = defaultdict(list)
    for (name, _), entry in stored(saved).items():
        slots[name].append(entry)
    rows = []
    for name, entries in slots.items():
        weights = [entry for entry in entries if not entry.slot]
        others = ", ".join(f"{entry.slot} {entry.dtype}" for entry in entries if entry.slot)
        shape, dtype = (str(list(weights[0].shape)), weights[0].dtype) if weights else ("-", "-")
        rows.append((name, shape, dtype, others))
    return rows


def _entry(saved: Checkpoint, key: str) -> Entry:
    from difflib import get_close_matches

    entries = {entry.key: entry for entry in stored(saved).values()}
    if key not in entries:
        near = get_close_matches(key, entries, n=3, cutoff=0.3)
        fix = f"did you mean {' or '.join(near)}?" if near else "`show PATH` alone lists the tensors"
        raise UserError(Problem("NAME", key, "there is no such tensor in it", fix))
    return entries[key]
