"""One update: forward and backward over micro-batches, reduce, check finite, clip, update."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from dataclasses import dataclass

import paddle
from paddle import nn

from ppfleetx.config import Config
from ppfleetx.config.schema import SplitConfig
from ppfleetx.data import Batch
from ppfleetx.distributed import ParallelContext, RNGStatesTracker
from ppfleetx.distributed.collectives import all_reduce_sum_
from ppfleetx.distributed.interleaved import InterleavedPipeline
from ppfleetx.distributed.pipeline import Pipeline
from ppfleetx.distributed.sharding import ShardedParameters
from ppfleetx.distributed.trainable import Dtypes, Trainable, WholeParameters
from ppfleetx.engine.debug import Fault
from ppfleetx.engine.precision import Precision, parameter_dtype
from ppfleetx.layers.edges import Edges
from ppfleetx.layers.loss import IGNORE_INDEX, ParallelCrossEntropy
from ppfleetx.layers.parameter import logical_parameters
from ppfleetx.models.pieces import PieceList
from ppfleetx.models.registry import build_model, summary

logger = logging.getLogger("ppfleetx")


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
        self.precision = Precision(config.Engine.mix_precision, config.Global.device, config.derived.data_degree)
        self.loss = ParallelCrossEntropy(config.Model.vocab_size, edges_of(config, context))
        assert config.Data.Train is not None
        self.pipeline = make_pipeline(config, context, config.Data.Train)
        self._config = config
        self.will_evaluate(config.Data.Eval or config.Data.Train)

    def will_evaluate(self, data: SplitConfig) -> None:
        """What `evaluate` is about from now on: its sequences may be of another length than those of training."""
        self._evaluation_pipeline = make_pipeline(self._config, self.context, data)

    def run(self, batch: Batch, learning_rate: float, fault: Fault) -> StepResult:
        """One update from this rank's part of the global batch; every rank must call it.

        Raises:
            NotFinite: before the update, on all ranks alike.
        """
        with fault.spoiled_gradient(self.model):
            mean_loss = self._forward_backward(batch)
        self.trainable.reduce()
        loss, norm = paddle.stack([mean_loss, self.trainable.norm()]).tolist()  # the one wait for the device
        scaler, scale = self.precision.scaler, self.precision.loss_scale()
        norm /= scale
        finite = math.isfinite(norm) and math.isfinite(loss)  # alike on all ranks, as both numbers are
        if not finite and scaler is None:
            raise NotFinite(f"loss {loss}, gradient norm {norm}")
        if finite:
            clipped = self.clip_norm / norm if 0 < self.clip_norm < norm else 1.0
            self._apply(learning_rate, clipped / scale)
        if scaler is not None:
            scaler.update(finite)
        self.trainable.after_update()
        return StepResult(loss, norm, finite)

    def _apply(self, learning_rate: float, factor: float) -> None:
        """The optimizer's step with the gradients times `factor`."""
        if factor != 1.0:
            self.trainable.scale(factor)
        with self.trainable.updating():
            self.optimizer.set_lr(learning_rate)
            self.optimizer.step()

    def evaluate(self, batch: Batch) -> tuple[float, float]:
        """(sum of the losses, number of predicted tokens) of the global batch; every rank must call it."""
        batch = self._own_part(batch)
        micro_batches = self._micro_batches(batch)
        losses = self._evaluation_pipeline.evaluate(
            len(micro_batches), lambda i, x, chunk: self._compute(micro_batches[i], x, chunk)
        )
        total = sum((float(loss.item()) for loss in losses), 0.0)
        own = _predicted_tokens(batch) if self.pipeline.is_last else 0.0
        sums = all_reduce_sum_(paddle.to_tensor([total, own], dtype="float64"), self.context.data_group)
        loss_sum, tokens = all_reduce_sum_(sums, self.context.group("pp")).tolist()
        return loss_sum, tokens

    def _forward_backward(self, batch: Batch) -> paddle.Tensor:
        """Sums gradients of the global batch's mean loss over this rank's part into `.grad`; returns that loss, float32 []."""
        batch = self._own_part(batch)
        divisor = max(self._global_tokens(batch), 1.0)
        micro_batches = self._micro_batches(batch)
        total = paddle.zeros([], "float32")

        def forward(number: int, received: paddle.Tensor | None, chunk: int) -> paddle.Tensor:
            nonlocal total
            result = self._compute(micro_batches[number], received, chunk)
            if not self.pipeline.is_end(chunk):
                return result
            loss = result / divisor
            total = total + loss.detach()
            return self.precision.scale(loss)

        self.pipeline.train(len(micro_batches), forward)
        all_reduce_sum_(total, self.context.group("pp"))
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
        own = _predicted_tokens(batch)
        if self.context.data_group is None:
            return own
        return float(all_reduce_sum_(paddle.to_tensor(own, dtype="float64"), self.context.data_group).item())

    def _compute(
        self, micro_batch: tuple[paddle.Tensor, ...], received: paddle.Tensor | None, chunk: int
    ) -> paddle.Tensor:
        """A chunk's part of a micro-batch: the activation for the next place [s, b, h], or at the end of the model the sum
        of the unmasked losses, float32 []."""
        ids, labels, mask = micro_batch
        with self.precision.autocast():
            result = self.model(ids if received is None else received, chunk)
        if not self.pipeline.is_end(chunk):
            return result
        losses = self.loss(result, labels.transpose([1, 0]))
        return (losses * mask.transpose([1, 0])).sum()

    def _micro_batches(self, batch: Batch) -> list[tuple[paddle.Tensor, ...]]:
        """(ids, labels int64 [b, s], loss mask float32 [b, s]) of each micro-batch, on the device."""
        starts = range(0, len(batch.ids), self.micro_batch_size)
        arrays = (batch.ids, batch.labels, batch.loss_mask)
        return [tuple(paddle.to_tensor(array[at : at + self.micro_batch_size]) for array in arrays) for at in starts]


def _predicted_tokens(batch: Batch) -> float:
    """Places of the batch that the loss counts."""
    return float((batch.loss_mask * (batch.labels != IGNORE_INDEX)).sum())


def make_pipeline(config: Config, context: ParallelContext, data: SplitConfig) -> Pipeline:
    """This rank's stage for sequences of `data`; between stages go activations [s, b, h], s cut by sep and by sequence
    parallel."""
    length = data.dataset.max_seq_len // context.topology.sep_info.size
    if config.Model.sequence_parallel:
        length //= context.topology.mp_info.size
    shape = [length, config.Global.micro_batch_size, config.Model.hidden_size]
    dtype, group = parameter_dtype(config.Engine.mix_precision, config.Global.device), context.group("pp")
    if group is not None and config.Model.virtual_pp_degree > 1:
        return InterleavedPipeline(group, shape, dtype, config.Model.virtual_pp_degree)
    return Pipeline(group, shape, dtype)


def stage_of(context: ParallelContext) -> tuple[int, int]:
    """(number, count) of pipeline stages."""
    return context.topology.pp_info.rank, context.topology.pp_info.size


def make_model(config: Config, context: ParallelContext, tracker: RNGStatesTracker) -> PieceList:
    """This rank's part of the model. Where it is sharded, its parameters have no memory yet: `make_trainable` initialises them
    one by one and keeps this rank's cuts."""
    logger.info("%s", summary(config))
    sharded = config.Distributed.sharding.sharding_degree > 1
    with paddle.LazyGuard() if sharded else contextlib.nullcontext():
        return build_model(config, tracker, edges_of(config, context), stage_of(context))


def make_trainable(config: Config, context: ParallelContext, model: PieceList) -> Trainable:
    """What the optimizer updates: the model's own parameters, or this rank's cuts of them."""
    precision, sharding = config.Engine.mix_precision, config.Distributed.sharding
    sequence_parallel = edges_of(config, context).sequence_parallel
    compute = parameter_dtype(precision, config.Global.device)
    # float32 parameters have float32 gradients anyway
    dtypes = Dtypes(compute, precision.reduce_dtype, config.derived.use_main_grad and compute != "float32")
    if sharding.sharding_degree > 1:
        pieces = [piece for chunk in model.chunks for piece in chunk]
        return ShardedParameters(context, pieces, sharding, sequence_parallel, dtypes)
    return WholeParameters(context, logical_parameters(model), sequence_parallel, dtypes)


def edges_of(config: Config, context: ParallelContext) -> Edges:
    """Where this rank's layers change between whole and cut values."""
    return Edges(context.group("mp"), config.Model.sequence_parallel, context.group("sep"))
