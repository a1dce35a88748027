"""Where a run stands."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Progress:
    """Counters that a checkpoint carries.

    Attributes:
        step: updates done, skipped ones included.
        consumed_samples: global samples read so far; the data's position.
        skipped_steps: updates that float16 skipped for overflow; the schedule does not count them.
        skipped_in_row: of these, the latest without a gap.
    """

    step: int = 0
    consumed_samples: int = 0
    skipped_steps: int = 0
    skipped_in_row: int = 0
