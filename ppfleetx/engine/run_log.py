"""What a run tells while it runs: log lines, metrics, progress bar, profile."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING

import paddle

from ppfleetx.engine.data import RunData
from ppfleetx.engine.failures import RunError
from ppfleetx.engine.step import StepResult
from ppfleetx.metrics.console import Progress as ProgressBar
from ppfleetx.metrics.memory import peak_memory_bytes
from ppfleetx.metrics.meter import Meter, StepRecord, peak_flops
from ppfleetx.metrics.profiler import Profiling
from ppfleetx.metrics.records import EvalRecord, Record, TrainRecord
from ppfleetx.metrics.sinks import MetricsWriter
from ppfleetx.models.registry import flops_per_token
from ppfleetx.optim.schedules import Schedule

if TYPE_CHECKING:
    from ppfleetx.engine.engine import Engine


class RunLog(contextlib.ExitStack):
    """The log of one `fit`, a context; every rank holds one, rank 0 alone writes. Nothing here communicates. At the end what
    there is of a window gets its line.

    Args:
        engine: what is run; its progress gives the step.
        data: gives the length of the run.
        schedule: updates done → learning rate.
    """

    def __init__(self, engine: Engine, data: RunData, schedule: Schedule):
        super().__init__()
        config, rank = engine.config, engine.context.topology.device_rank
        assert config.Data.Train is not None
        self._engine, self._schedule = engine, schedule
        self._logging_freq = config.Engine.logging_freq
        self._step, self._epoch = engine.progress.step, 0  # of the last update that was counted
        seq_len = config.Data.Train.dataset.max_seq_len
        self._writer: MetricsWriter | None = None
        if engine.context.is_main:
            writer = MetricsWriter(
                str(engine.output_dir), resume_step=engine.progress.step, visualdl=config.Engine.visualdl
            )
            self._writer = self.enter_context(writer)
        self._profiling = self.enter_context(Profiling(config.Profiler, str(engine.output_dir), rank))
        self._bar = ProgressBar(data.num_updates, engine.progress.step, engine.context.is_main)
        self.callback(self._bar.close)
        self._meter = Meter(
            tokens_per_update=config.derived.global_batch_size * seq_len,
            world_size=config.derived.world_size,
            flops_per_token=flops_per_token(config, seq_len),
            peak_flops=peak_flops(_device_name(engine.context.device), engine.train_step.precision.enabled),
            sums=engine.progress.window,
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None or isinstance(error, RunError):  # else who knows what still works
            self._write_window()
        return bool(super().__exit__(kind, error, trace))

    def after_update(self, result: StepResult, epoch: int) -> None:
        """Counts an update, and writes its line if one is due."""
        progress = self._engine.progress
        self._step, self._epoch = progress.step, epoch
        self._meter.update(StepRecord(result.loss, result.grad_norm, not result.applied))
        self._profiling.step()
        self._bar.update(progress.step, result.loss)
        if progress.step % self._logging_freq == 0:
            self._write_window()
            self._meter.start()
            progress.window = self._meter.sums

    def _write_window(self) -> None:
        """Writes the line of the window as it stands, if it has updates."""
        engine, progress = self._engine, self._engine.progress
        if (window := self._meter.window()) is None:
            return
        record = TrainRecord(
            step=self._step,
            epoch=self._epoch,
            learning_rate=self._schedule(progress.step - progress.skipped_steps),
            loss_scale=engine.train_step.precision.loss_scale(),
            skipped_steps=progress.skipped_steps,
            memory_bytes=peak_memory_bytes(engine.config.Global.device),
            **vars(window),
        )
        self._write(record)

    def after_evaluation(self, loss: float, batches: int, cost_s: float) -> None:
        """Writes an evaluation's line. `cost_s`: seconds that the whole evaluation took."""
        step = self._engine.progress.step
        self._write(EvalRecord(step=step, loss=loss, batches=batches, avg_batch_cost_s=cost_s / max(batches, 1)))

    def has_evaluation(self, step: int) -> bool:
        """Whether an evaluation after update `step` is in the log, on rank 0."""
        kept = [] if self._writer is None else self._writer.kept
        return any(record["kind"] == "eval" and record["step"] == step for record in kept)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Time spent inside does not count as training."""
        with self._meter.pause():
            yield

    def _write(self, record: Record) -> None:
        if self._writer is not None:
            self._writer.write(record)


def _device_name(device: str) -> str:
    return paddle.device.cuda.get_device_name() if device.startswith("gpu") else device
