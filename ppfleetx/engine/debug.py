"""The `Debug` section at work: failures made on purpose."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator

import paddle
from paddle import nn

from ppfleetx.config.schema import FaultConfig
from ppfleetx.distributed.trainable import Trainable

#: exit code of `Debug.fault.kind: exit`
FAULT_EXIT_CODE = 7


class Fault:
    """The fault of one update on one rank; does nothing on other updates and ranks."""

    def __init__(self, section: FaultConfig | None, rank: int, step: int):
        due = section is not None and section.rank == rank and section.step == step
        self.kind = section.kind if due and section is not None else None

    def strike(self, trainable: Trainable) -> None:
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
            first = next(iter(trainable.named.values()))
            first.copy_(paddle.full_like(first, float("nan")), True)  # set_value would move it to the default device
            trainable.after_load()

    @contextlib.contextmanager
    def spoiled_gradient(self, model: nn.Layer) -> Iterator[None]:
        """Around forward and backward: the gradient of the model's first parameter comes out infinite."""
        if self.kind != "inf_grad":
            yield
            return
        first = next(iter(model.parameters()))
        hook = first.register_hook(lambda gradient: paddle.full_like(gradient, float("inf")))
        yield
        hook.remove()
