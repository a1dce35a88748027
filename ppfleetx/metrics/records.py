"""What is logged, defined once: the same fields make the console line, `metrics.jsonl` and the VisualDL scalars."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Window:
    """The updates between two log lines. Means are over the updates of the window.

    Attributes:
        updates: of the window, the latest ones. A run that ends or is stopped inside a window logs what there is of it; if it
            is resumed, the window goes on, and its record counts them again.
        loss: mean loss.
        grad_norm: mean global gradient norm before clipping, over the updates that were not skipped; None: not known.
        found_inf: updates that were skipped because of an fp16 overflow.
        avg_batch_cost_s: mean time of an update, evaluation and saving left out; of those since the last start.
        tokens_per_second: of the whole run.
        tokens_per_second_per_device: the same, divided by the world size.
        mfu: share of the device's peak arithmetic rate that the model's own operations use; None: peak not known.
    """

    updates: int
    loss: float
    grad_norm: float | None
    found_inf: int
    avg_batch_cost_s: float
    tokens_per_second: float
    tokens_per_second_per_device: float
    mfu: float | None


@dataclass(frozen=True, kw_only=True)
class TrainRecord(Window):
    """One training log line: `TrainRecord(step=…, …, **vars(window))`.

    Attributes:
        step: updates done, from 1.
        epoch: pass over the data, from 0.
        learning_rate: the schedule's value after `step` updates (the rate of the next one), as PaddleFleetX prints it.
        loss_scale: scale of the next update; 1 without fp16.
        skipped_steps: updates of the whole run that were skipped because of an fp16 overflow.
        memory_bytes: peak of live tensors on rank 0's device; None: not known.
    """

    kind: str = field(default="train", init=False)
    step: int
    epoch: int
    learning_rate: float
    loss_scale: float = 1.0
    skipped_steps: int = 0
    memory_bytes: int | None = None

    def values(self) -> dict[str, Any]:
        """All fields by name."""
        return dict(vars(self))

    def line(self) -> str:
        """PaddleFleetX's log line with more after it; `batch` counts from 0, `ips` is per device."""
        norm, mfu, memory = self.grad_norm, self.mfu, self.memory_bytes
        total, each = self.tokens_per_second, self.tokens_per_second_per_device
        return ", ".join([
            f"[train] epoch: {self.epoch}, batch: {self.step - 1}, loss: {self.loss:.9f}",
            f"avg_batch_cost: {self.avg_batch_cost_s:.5f} sec, speed: {1 / self.avg_batch_cost_s:.2f} step/s",
            f"ips_total: {total:.0f} tokens/s, ips: {each:.0f} tokens/s/device",
            f"learning rate: {self.learning_rate:.5e}",
            f"grad_norm: {'-' if norm is None else f'{norm:.9f}'}",
            f"loss_scale: {self.loss_scale}, found_inf: {self.found_inf}",
            f"mfu: {'-' if mfu is None else f'{mfu:.1%}'}",
            f"mem: {'-' if memory is None else f'{memory / 1e6:.1f} MB'}",
        ])  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class EvalRecord:
    """One evaluation.

    Attributes:
        kind: "eval" or "test".
        step: training updates done before it.
        loss: mean loss in nats a token.
        batches: global batches evaluated.
        avg_batch_cost_s: mean time of a batch.
    """

    kind: str = "eval"
    step: int
    loss: float
    batches: int
    avg_batch_cost_s: float

    @property
    def ppl(self) -> float:
        """Perplexity, e to the loss; infinite where that is too large for a float."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf

    def values(self) -> dict[str, Any]:
        """All fields by name."""
        return {**vars(self), "ppl": self.ppl}

    def line(self) -> str:
        """The log line."""
        return (
            f"[{self.kind}] step: {self.step}, loss: {self.loss:.9f}, ppl: {self.ppl:.3f}, batches: {self.batches}, "
            f"avg_batch_cost: {self.avg_batch_cost_s:.5f} sec"
        )


Record = TrainRecord | EvalRecord
