"""Where a run stands."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

from ppfleetx.metrics.meter import Sums

#: counters without which nobody knows where the run stands; every checkpoint has them
_NEEDED = frozenset({"step", "consumed_samples"})


@dataclass
class Progress:
    """Counters that a checkpoint carries. A new one needs a default that is right for checkpoints from before it.

    Attributes:
        step: updates done, skipped ones included.
        consumed_samples: global samples read so far; the data's position.
        skipped_steps: updates that float16 skipped for overflow; the schedule does not count them.
        skipped_in_row: of these, the latest without a gap.
        evaluation_due: 1 if an evaluation is due after update `step` and has not been made, as a stop came first; else 0.
        window: what the next log line sums up, so far.
    """

    step: int = 0
    consumed_samples: int = 0
    skipped_steps: int = 0
    skipped_in_row: int = 0
    evaluation_due: int = 0
    window: Sums = field(default_factory=Sums)

    def state_dict(self) -> dict[str, Any]:
        """As JSON has it: a sum that is not finite is None."""
        state = asdict(self)
        state["window"] = {name: value if math.isfinite(value) else None for name, value in state["window"].items()}
        return state


class Stored(NamedTuple):
    """What a checkpoint tells of the progress.

    Attributes:
        progress: of the counters that are known here.
        unknown: names that are not, of a newer version of ppfleetx.
        lacking: counters that an older version did not have; they are as in a new run.
    """

    progress: Progress
    unknown: list[str]
    lacking: list[str]


def progress_of(state: Mapping[str, Any]) -> Stored:
    """The inverse of `Progress.state_dict`, of this version or another.

    Raises:
        ValueError: a counter is no number that can be, or one that every checkpoint has is missing.
    """
    names = [one.name for one in fields(Progress)]
    found = {name: state[name] for name in names if name in state}
    window = found.pop("window", {})
    if not (found.keys() >= _NEEDED and all(map(_is_count, found.values())) and isinstance(window, dict)):
        raise ValueError(f"its progress is {dict(state)}")
    unknown = [name for name in state if name not in names]
    return Stored(Progress(**found, window=_sums(window)), unknown, [name for name in names if name not in state])


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**62


def _sums(state: Mapping[str, Any]) -> Sums:
    """Of a window; ValueError if they make no sense. None stands for a sum that is not finite."""
    known = {one.name: one.type for one in fields(Sums) if one.name in state}
    for name, kind in known.items():
        if not (_is_count(state[name]) if kind == "int" else state[name] is None or type(state[name]) in (int, float)):
            raise ValueError(f"its window of log values is {dict(state)}")
    values: dict[str, Any] = {name: math.nan if state[name] is None else state[name] for name in known}
    return Sums(**values)
