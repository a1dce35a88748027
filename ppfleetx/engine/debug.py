"""The `Debug` section at work: failures made on purpose."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping

import paddle

from ppfleetx.config.schema import FaultConfig

#: exit code of `Debug.fault.kind: exit`
FAULT_EXIT_CODE = 7


class Fault:
    """The fault of one update on one rank; does nothing on other updates and ranks."""

    def __init__(self, section: FaultConfig | None, rank: int, step: int):
        due = section is not None and section.rank == rank and section.step == step
        self.kind = section.kind if due and section is not None else None

    def strike(self, named: Mapping[str, paddle.Tensor]) -> None:
        """Called before the update's forward pass."""
        if self.kind == "raise":
            raise RuntimeError("Debug.fault: raise")
        if self.kind == "exit":
            os._exit(FAULT_EXIT_CODE)
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "hang":
            time.sleep(10**6)
        if self.kind == "nan_weight":
            first = next(iter(named.values()))
            first.set_value(paddle.full_like(first, float("nan")))

    def spoil_gradient(self, named: Mapping[str, paddle.Tensor]) -> None:
        """Called after the backward pass, before gradients are reduced."""
        if self.kind == "inf_grad":
            with paddle.no_grad():
                next(iter(named.values())).grad.fill_(float("inf"))
