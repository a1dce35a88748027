"""Which checkpoints of a run stay."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ppfleetx.checkpoint.files import sync

_STEP = re.compile(r"^step_(\d+)$")


@dataclass(frozen=True)
class Retention:
    """A checkpoint stays if either says so.

    Attributes:
        keep_last: so many newest ones stay; None: all.
        keep_every: those of steps that this divides stay; None: no further ones.
    """

    keep_last: int | None = None
    keep_every: int | None = None

    def superfluous(self, complete: Sequence[Path]) -> list[Path]:
        """Those of the complete checkpoints (oldest first) that need not stay."""
        if self.keep_last is None:
            return []
        old = complete[: max(len(complete) - self.keep_last, 0)]
        return [path for path in old if self.keep_every is None or step_of(path) % self.keep_every]


def steps_in(folder: Path) -> list[Path]:
    """The step folders in a folder, oldest first, complete or not; none if it is no folder that can be read."""
    try:
        return sorted((path for path in folder.iterdir() if _STEP.match(path.name)), key=step_of)
    except OSError:
        return []


def step_of(path: Path) -> int:
    """The step that a step folder is of."""
    return int(path.name.removeprefix("step_"))


def delete(path: Path) -> None:
    """Deletes a checkpoint; it is whole or not there at any time, as the folder gets another name first.

    Raises:
        OSError: it cannot be deleted.
    """
    doomed = path.with_name(f".{path.name}.deleted")
    os.replace(path, doomed)
    sync(path.parent)
    shutil.rmtree(doomed)
