"""One update: forward and backward over micro-batches, reduce, check finite, clip, update."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import paddle
from paddle import nn

from ppfleetx.config import Config
from ppfleetx.data import Batch
from ppfleetx.distributed import ParallelContext
from ppfleetx.distributed.collectives import all_reduce_sum_
from ppfleetx.distributed.trainable import Trainable, WholeParameters
from ppfleetx.engine.debug import Fault
from ppfleetx.engine.precision import Precision
from ppfleetx.layers.edges import Edges
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
        self,
        config: Config,
        context: ParallelContext,
        model: nn.Layer,
        trainable: Trainable,
        optimizer: paddle.optimizer.Optimizer,
    ):
        self.context, self.model, self.trainable, self.optimizer = context, model, trainable, optimizer
        self.micro_batch_size = config.Global.micro_batch_size
        self.clip_norm = config.Optimizer.grad_clip.clip_norm if config.Optimizer.grad_clip else 0.0
        self.precision = Precision(config.Engine.mix_precision, config.Global.device)
        self.precision.decorate(model, optimizer)
        self.loss = ParallelCrossEntropy(config.Model.vocab_size, edges_of(config, context))

    def run(self, batch: Batch, learning_rate: float, fault: Fault) -> StepResult:
        """One update from this rank's part of the global batch; every rank must call it.

        Raises:
            NotFinite: before the update, on all ranks alike.
        """
        mean_loss = self._forward_backward(batch)
        fault.spoil_gradient(self.trainable.named)
        self.trainable.reduce()
        scaler = self.precision.scaler
        if scaler is not None:
            scaler.unscale_(self.optimizer)
        loss, norm = paddle.stack([mean_loss, self.trainable.norm()]).tolist()  # the one wait for the device
        finite = math.isfinite(norm) and math.isfinite(loss)
        if not finite and scaler is None:
            raise NotFinite(f"loss {loss}, gradient norm {norm}")
        if finite and 0 < self.clip_norm < norm:
            self.trainable.scale(self.clip_norm / norm)
        self.optimizer.set_lr(learning_rate)
        if scaler is None:
            self.optimizer.step()
        else:
            scaler.step(self.optimizer)  # skips where unscale_ found an overflow
            scaler.update()
        self.trainable.after_update()
        return StepResult(loss, norm, finite)

    def evaluate(self, batch: Batch) -> tuple[float, float]:
        """(sum of the losses, number of predicted tokens) of the global batch; every rank must call it."""
        batch = self._own_part(batch)
        with paddle.no_grad():
            losses = [self._loss_sum(*micro) for micro in self._micro_batches(batch)]
            total = paddle.stack(losses).astype("float64").sum()
            sums = paddle.stack([total, paddle.to_tensor(float(batch.loss_mask.sum()), dtype="float64")])
            all_reduce_sum_(sums, self.context.data_group)
        loss_sum, tokens = sums.tolist()
        return loss_sum, tokens

    def _forward_backward(self, batch: Batch) -> paddle.Tensor:
        """Sums gradients of the global batch's mean loss over this rank's part into `.grad`; returns that loss, float32 []."""
        batch = self._own_part(batch)
        divisor = max(self._global_tokens(batch), 1.0)
        total = paddle.zeros([], "float32")
        for micro in self._micro_batches(batch):
            loss = self._loss_sum(*micro) / divisor
            self.precision.scale(loss).backward()
            total = total + loss.detach()
        return all_reduce_sum_(total, self.context.data_group)

    def _own_part(self, batch: Batch) -> Batch:
        """This rank's part of every sequence, where the sep group cuts them: [local, s] → [local, s/sep]."""
        group = self.context.group("sep")
        if group is None:
            return batch
        length = batch.ids.shape[1] // group.nranks
        part = slice(group.rank * length, (group.rank + 1) * length)
        cut = {name: getattr(batch, name)[:, part] for name in ("ids", "labels", "loss_mask")}
        return dataclasses.replace(batch, **cut)

    def _global_tokens(self, batch: Batch) -> float:
        """Predicted tokens of the global batch."""
        own = float(batch.loss_mask.sum())
        if self.context.data_group is None:
            return own
        return float(all_reduce_sum_(paddle.to_tensor(own, dtype="float64"), self.context.data_group).item())

    def _loss_sum(self, ids: paddle.Tensor, labels: paddle.Tensor, mask: paddle.Tensor) -> paddle.Tensor:
        """ids, labels int64 [b, s], mask float32 [b, s] → sum of the unmasked losses, float32 []."""
        with self.precision.autocast():
            logits = self.model(ids)
        losses = self.loss(logits, labels.transpose([1, 0]))
        return (losses * mask.transpose([1, 0])).sum()

    def _micro_batches(self, batch: Batch) -> Iterator[tuple[paddle.Tensor, ...]]:
        """(ids, labels, loss mask) of each micro-batch on the device."""
        for start in range(0, len(batch.ids), self.micro_batch_size):
            rows = slice(start, start + self.micro_batch_size)
            yield tuple(paddle.to_tensor(array[rows]) for array in (batch.ids, batch.labels, batch.loss_mask))


def make_trainable(config: Config, context: ParallelContext, model: nn.Layer) -> Trainable:
    """What the optimizer updates: the model's own parameters, or this rank's cuts of them."""
    named = logical_parameters(model)
    reduce_dtype = config.Engine.mix_precision.reduce_dtype
    return WholeParameters(context, named, edges_of(config, context).sequence_parallel, reduce_dtype)


def edges_of(config: Config, context: ParallelContext) -> Edges:
    """Where this rank's layers change between whole and cut values."""
    return Edges(context.group("mp"), config.Model.sequence_parallel, context.group("sep"))
