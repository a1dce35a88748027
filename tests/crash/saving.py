"""What the processes of test_kills.py run: one rank's part of a save, which SIGKILL may end at a given disk operation."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ppfleetx.checkpoint.layout import PieceLayout
from ppfleetx.checkpoint.manager import write_checkpoint
from ppfleetx.checkpoint.snapshot import Held, Snapshot
from ppfleetx.distributed.agreement import Meetings
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.distributed.store import JobStore
from ppfleetx.distributed.topology import Topology
from ppfleetx.layers.spec import ParameterSpec
from tests.disk import Strike

#: of the model's one matrix, cut by rows
SHAPE = (6, 4)


class Transport:
    """The job's store over a dictionary that processes share."""

    def __init__(self, values: Any, lock: Any):
        self._values, self._lock = values, lock

    def set(self, key: str, text: str) -> None:
        self._values[key] = text.encode()

    def get(self, key: str) -> Any:
        return self._values[key]

    def add(self, key: str, increment: int) -> int:
        with self._lock:
            self._values[key] = self._values.get(key, 0) + increment
            return int(self._values[key])


class _Patch:
    setattr = staticmethod(setattr)


def save(folder: Path, step: int, rank: int, world: int, shared: Any, struck: tuple[int, bool] | None) -> int:
    """Writes this rank's part of a model whose elements are all `step`; how many disk operations that took.

    Args:
        shared: (values, lock) of a multiprocessing manager, for several ranks.
        struck: (number, after) of the operation that kills this process; None: it lives.
    """
    rows = SHAPE[0] // world
    box = ((rank * rows, (rank + 1) * rows), (0, SHAPE[1]))
    layout = PieceLayout(ParameterSpec(name="a.weight", shape=SHAPE), box, None)
    held = [Held(slot, layout, "F32", np.full(rows * SHAPE[1], step, np.float32)) for slot in ("", "moment1")]
    meetings = None if world == 1 else Meetings(JobStore(Transport(*shared), rank, world))
    context = ParallelContext(Topology(rank, world), "cpu", {}, meetings)
    strike = Strike(_Patch, *(struck or ()))
    write_checkpoint(context, folder, step, Snapshot(held, {"seed": rank}, {"step": step}, {}))
    return strike.count


def run(report: Callable[[int], None], *arguments: Any) -> None:
    """`save` in a process of its own."""
    os.environ["PADDLE_TRAINER_ENDPOINTS"] = ""
    report(save(*arguments))
