"""How one YAML key is described: default, meaning, unit and bounds, in one place that checks and documents it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

#: default of a key that has none: leaving it out is a user's mistake
REQUIRED: Any = dataclasses.MISSING


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Limits of a value (for a list: of each of its items).

    Attributes:
        choices: allowed values; texts are compared without regard to case and stored as written here.
        at_least, above, below: the value v must satisfy at_least <= v, above < v < below.
        length: number of items a list must have.
        words: texts allowed where a number is wanted.
    """

    choices: Sequence[Any] | None = None
    at_least: float | None = None
    above: float | None = None
    below: float | None = None
    length: int | None = None
    words: Sequence[str] = ()


def key(default: Any, doc: str, *, unit: str = "", derived: str = "", family: str = "", **bounds: Any) -> Any:
    """A dataclass field for one YAML key.

    Args:
        default: value when the key is absent or null (`REQUIRED`: it may not be absent).
        doc: one line of meaning.
        unit: what a number counts.
        derived: for a key that may be null: how its value is worked out then (computed in `derive.py`).
        family: the one model family that has this key; others refuse it.
        bounds: see `Bounds`.
    """
    metadata = {"doc": doc, "unit": unit, "derived": derived, "family": family, "bounds": Bounds(**bounds)}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def section(cls: type, doc: str) -> Any:
    """A dataclass field for a nested section; absent or null means all its defaults."""
    return dataclasses.field(default_factory=cls, metadata={"doc": doc, "bounds": Bounds()})


def optional_section(doc: str, *, family: str = "") -> Any:
    """A dataclass field for a section that may be absent (None), which switches its part off. `family`: see `key`."""
    return dataclasses.field(default=None, metadata={"doc": doc, "family": family, "bounds": Bounds()})
