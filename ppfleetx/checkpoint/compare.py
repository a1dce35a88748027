"""How two checkpoints differ, whatever the layouts that wrote them. Imports no Paddle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ppfleetx.checkpoint.manifest import Entry
from ppfleetx.checkpoint.reader import Checkpoint
from ppfleetx.checkpoint.shards import DTYPES
from ppfleetx.checkpoint.stream import PIECE_BYTES, numbers, pieces, stored

#: parts of `Manifest.run` that are compared
_RUN = ("config", "layout", "versions")


class Difference(NamedTuple):
    """What is different.

    Attributes:
        settings: lines about progress, config, layout and versions: how the runs differ.
        tensors: lines about tensors: how the states differ.
        num_equal: tensors that are equal to the bit.
    """

    settings: list[str]
    tensors: list[str]
    num_equal: int


def compare(a: Checkpoint, b: Checkpoint, weights_only: bool = False) -> Difference:
    """Reads both in pieces.

    Args:
        weights_only: leave out what the optimizer keeps.

    Raises:
        Damaged: a file is not what its manifest says.
    """
    in_a, in_b = ({key: e for key, e in stored(one).items() if not (weights_only and key[1])} for one in (a, b))
    lines: list[str] = []
    for key in sorted({**in_a, **in_b}):
        if key in in_a and key in in_b:
            lines += _tensor_lines(a, in_a[key], b, in_b[key])
        else:
            where, entry = ("A", in_a[key]) if key in in_a else ("B", in_b[key])
            lines.append(f"{entry.key}: only in {where}, {entry.dtype} {list(entry.shape)}")
    return Difference(_settings(a, b), lines, len({**in_a, **in_b}) - len(lines))


def differences(old: Any, new: Any, path: str = "") -> dict[str, tuple[Any, Any]]:
    """Leaves of two trees of mappings that differ, by dotted path."""
    if isinstance(old, dict) and isinstance(new, dict):
        found: dict[str, tuple[Any, Any]] = {}
        for name in sorted({*old, *new}):
            found |= differences(old.get(name), new.get(name), f"{path}.{name}" if path else name)
        return found
    return {} if old == new else {path: (old, new)}


def setting(tree: Any, path: str) -> Any:
    """The value at a dotted path of a tree of mappings; None if there is none."""
    for name in path.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


@dataclass
class _Gap:
    """How far two tensors are apart, counted as they pass by.

    Attributes:
        size: elements seen.
        first: the first that differs, in row-major order.
        num_unequal: how many differ.
        absolute, relative: largest |a − b|, and largest |a − b| / max(|a|, |b|).
    """

    size: int = 0
    first: int | None = None
    num_unequal: int = 0
    absolute: float = 0.0
    relative: float = 0.0

    def add(self, a: np.ndarray, b: np.ndarray, unequal: np.ndarray) -> None:
        """The next values of both, as float64, and which of them differ."""
        if unequal.any():
            if self.first is None:
                self.first = self.size + int(unequal.argmax())
            self.num_unequal += int(unequal.sum())
            p, q = a[unequal], b[unequal]
            with np.errstate(over="ignore", invalid="ignore"):  # infinite values are told, not warned of
                gap = np.where(np.isnan(p) & np.isnan(q), 0.0, np.abs(p - q))
                gap[np.isnan(gap)] = np.inf  # a number beside none
                scale = np.maximum(np.abs(p), np.abs(q))
                share = np.where(np.isfinite(gap), gap / np.where(scale > 0, scale, 1.0), np.inf)
            self.absolute, self.relative = max(self.absolute, gap.max()), max(self.relative, share.max())
        self.size += a.size


def _tensor_lines(a: Checkpoint, in_a: Entry, b: Checkpoint, in_b: Entry) -> list[str]:
    """One line if a tensor differs."""
    if in_a.shape != in_b.shape:
        return [f"{in_a.key}: shape {list(in_a.shape)} in A, {list(in_b.shape)} in B"]
    same_type, gap = in_a.dtype == in_b.dtype, _Gap()
    step = PIECE_BYTES // 32  # elements (float64 takes more memory): of both alike, whatever the dtypes
    both = [pieces(saved, e, step * DTYPES[e.dtype].itemsize) for saved, e in ((a, in_a), (b, in_b))]
    for x, y in zip(*both, strict=True):
        if same_type and np.array_equal(_bits(x), _bits(y)):  # the ordinary case, and much faster
            gap.size += x.size
            continue
        p, q = numbers(x, in_a.dtype), numbers(y, in_b.dtype)
        gap.add(p, q, _bits(x) != _bits(y) if same_type else (p != q) & ~(np.isnan(p) & np.isnan(q)))
    note = "" if same_type else f"; {in_a.dtype} in A, {in_b.dtype} in B"
    if gap.first is None:
        return [] if same_type else [f"{in_a.key}: equal values{note}"]
    where = [int(index) for index in np.unravel_index(gap.first, in_a.shape)]
    return [
        f"{in_a.key}: {gap.num_unequal} of {gap.size} values differ, the first at {where}; "
        f"largest difference {gap.absolute:.3g}, relative {gap.relative:.3g}{note}"
    ]


def _bits(memory: np.ndarray) -> np.ndarray:
    """Values as whole numbers: −0 is not 0, and a NaN equals itself."""
    return memory.view(f"u{memory.itemsize}")


def _settings(a: Checkpoint, b: Checkpoint) -> list[str]:
    old, new = (
        {"progress": one.manifest.progress, **{name: one.manifest.run.get(name, {}) for name in _RUN}} for one in (a, b)
    )
    return [
        f"{path}: {x!r} in A, {y!r} in B"
        for path, (x, y) in sorted(differences(old, new).items())
        if not path.startswith("config._derived")  # it follows from the rest
    ]
