"""One update: forward and backward over micro-batches, reduce, check finite, clip, update."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import paddle
from paddle import nn

from ppfleetx.config import Config
from ppfleetx.data import Batch
from ppfleetx.distributed import ParallelContext
from ppfleetx.distributed.clip import global_norm, scale_gradients
from ppfleetx.distributed.collectives import all_reduce_sum_, average_gradients
from ppfleetx.engine.debug import Fault
from ppfleetx.engine.precision import Precision
from ppfleetx.layers.loss import ParallelCrossEntropy
from ppfleetx.layers.parameter import logical_parameters


@dataclass(frozen=True)
class StepResult:
    """What one update did.

    Attributes:
        loss: mean loss over all predicted tokens of the global batch.
        grad_norm: global L2 norm of the gradients before clipping; inf or nan if they were not finite.
        applied: False if a float16 overflow made the scaler skip the update.
    """

    loss: float
    grad_norm: float
    applied: bool


class NotFinite(Exception):
    """Loss or gradient is inf or nan and no scaler is there to skip the update; the weights are untouched."""


class TrainStep:
    """Runs updates.

    The loss of a micro-batch is divided by the number of predicted (unmasked) tokens of the *global* batch, so that summing
    over micro-batches and data ranks gives the same mean, and the same gradient, however the batch is cut.
    """

    def __init__(
        self, config: Config, context: ParallelContext, model: nn.Layer, optimizer: paddle.optimizer.Optimizer
    ):
        self.context = context
        self.model = model
        self.optimizer = optimizer
        self.parameters = list(logical_parameters(model).values())
        self.micro_batch_size = config.Global.micro_batch_size
        self.clip_norm = config.Optimizer.grad_clip.clip_norm if config.Optimizer.grad_clip else 0.0
        self.precision = Precision(config.Engine.mix_precision, config.Global.device)
        self.precision.decorate(model, optimizer)
        self.loss = ParallelCrossEntropy(config.Model.vocab_size)

    def run(self, batch: Batch, learning_rate: float, fault: Fault) -> StepResult:
        """One update from this rank's part of the global batch; every data rank must call it.

        Raises:
            NotFinite: before the update, on all ranks alike.
        """
        loss = self._forward_backward(batch)
        fault.spoil_gradient(self.parameters)
        average_gradients(self.parameters, self.context.data_group, scale=1.0)  # the loss is divided already
        scaler = self.precision.scaler
        if scaler is not None:
            scaler.unscale_(self.optimizer)
        norm = float(global_norm(self.parameters).item())
        finite = math.isfinite(norm) and math.isfinite(loss)
        if finite and 0 < self.clip_norm < norm:
            scale_gradients(self.parameters, self.clip_norm / norm)
        if not finite and scaler is None:
            raise NotFinite(f"loss {loss}, gradient norm {norm}")
        self.optimizer.set_lr(learning_rate)
        if scaler is None:
            self.optimizer.step()
        else:
            scaler.step(self.optimizer)  # skips where unscale_ found an overflow
            scaler.update()
        self.optimizer.clear_grad(set_to_zero=False)
        return StepResult(loss, norm, finite)

    def evaluate(self, batch: Batch) -> tuple[float, float]:
        """(sum of the losses, number of predicted tokens) of the global batch; every data rank must call it."""
        total = 0.0
        with paddle.no_grad():
            for ids, labels, mask in self._micro_batches(batch):
                total += float(self._loss_sum(ids, labels, mask).item())
        sums = paddle.to_tensor([total, float(batch.loss_mask.sum())], dtype="float64")
        all_reduce_sum_(sums, self.context.data_group)
        loss_sum, tokens = sums.tolist()
        return loss_sum, tokens

    def _forward_backward(self, batch: Batch) -> float:
        """Gradients of the mean loss of the global batch, summed into `.grad` of this rank's part; returns the global loss."""
        tokens = paddle.to_tensor([float(batch.loss_mask.sum())], dtype="float64")
        all_reduce_sum_(tokens, self.context.data_group)
        divisor = max(float(tokens.item()), 1.0)
        total = paddle.zeros([], "float32")
        for ids, labels, mask in self._micro_batches(batch):
            loss = self._loss_sum(ids, labels, mask) / divisor
            self.precision.scale(loss).backward()
            total = total + loss.detach()
        all_reduce_sum_(total, self.context.data_group)
        return float(total.item())

    def _loss_sum(self, ids: paddle.Tensor, labels: paddle.Tensor, mask: paddle.Tensor) -> paddle.Tensor:
        """ids, labels int64 [b, s], mask float32 [b, s] → sum of the unmasked losses, float32 []."""
        with self.precision.autocast():
            logits = self.model(ids)
        losses = self.loss(logits, labels.transpose([1, 0]))
        return (losses * mask.transpose([1, 0])).sum()

    def _micro_batches(self, batch: Batch):  # type: ignore[no-untyped-def]
        for start in range(0, len(batch.ids), self.micro_batch_size):
            rows = slice(start, start + self.micro_batch_size)
            yield tuple(_tensor(array[rows]) for array in (batch.ids, batch.labels, batch.loss_mask))


def _tensor(array: np.ndarray) -> paddle.Tensor:
    return paddle.to_tensor(array)
