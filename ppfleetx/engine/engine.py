"""The training loop and evaluation."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import time
from pathlib import Path

import paddle
from paddle import nn

from ppfleetx.checkpoint.manager import KEY, CheckpointManager
from ppfleetx.checkpoint.retention import Retention
from ppfleetx.config import Config, Problem, UserError
from ppfleetx.config.rules import ends_early
from ppfleetx.data import Batch
from ppfleetx.distributed import ParallelContext, RNGStatesTracker
from ppfleetx.distributed.trainable import Trainable
from ppfleetx.engine import resume
from ppfleetx.engine.data import RunData, section_to_evaluate
from ppfleetx.engine.debug import Fault
from ppfleetx.engine.failures import EXIT_SAVE_FAILED, EXIT_STOPPED, RunError
from ppfleetx.engine.output_dir import newest_moved, prepared_output_dir
from ppfleetx.engine.progress import Progress
from ppfleetx.engine.run_log import RunLog
from ppfleetx.engine.step import NotFinite, StepResult, TrainStep
from ppfleetx.engine.stop import StopRequests
from ppfleetx.metrics.console import ALL_RANKS_LOGGER
from ppfleetx.metrics.records import EvalRecord
from ppfleetx.optim.schedules import Schedule, build_schedule

#: seconds that a rank which fails alone waits for the save that is under way: others may be gone
FAILURE_GRACE_S = 10.0

logger = logging.getLogger("ppfleetx")
every_rank = logging.getLogger(ALL_RANKS_LOGGER)


class Engine:
    """Trains a model; every rank holds one and makes the same calls.

    Args:
        config: the run's configuration.
        context: this rank's place and groups.
        tracker: the random streams, seeded.
        model: ids → logits.
        trainable: what the optimizer updates.
        optimizer: over it.
    """

    def __init__(
        self,
        config: Config,
        context: ParallelContext,
        tracker: RNGStatesTracker,
        model: nn.Layer,
        trainable: Trainable,
        optimizer: paddle.optimizer.Optimizer,
    ):
        self.config, self.context, self.tracker = config, context, tracker
        self.model, self.trainable, self.optimizer = model, trainable, optimizer
        self.train_step = TrainStep(config, context, model, trainable, optimizer)
        self.progress = Progress()
        section = config.Engine.save_load
        self.output_dir = Path(os.path.expanduser(section.output_dir))
        self.checkpoints = CheckpointManager(
            self.output_dir, context, Retention(section.keep_last, section.keep_every), section.consolidate
        )
        self.resumed_from: Path | None = None
        self._saved_step: int | None = None

    def restore(self, data: RunData, weights_only: bool = False) -> None:
        """Resumes from `Engine.save_load.ckpt_dir` if it names a checkpoint; every rank must call it.

        Args:
            data: what the run reads, for the ledger.
            weights_only: no more than the weights is needed.

        Raises:
            UserError: there is no such checkpoint, or it does not fit.
        """
        wanted = self.config.Engine.save_load.ckpt_dir
        path = self.checkpoints.restore(wanted, lambda path: resume.read(self, data, path, weights_only))
        if path is None and wanted is not None:
            self._say_fresh(wanted)
        self.resumed_from = path
        self._saved_step = self.progress.step if self.progress.step else None

    def _say_fresh(self, wanted: str) -> None:
        """Says that there is nothing to go on from, and where there is, if an earlier run was moved aside."""
        if not self.context.is_main:
            return
        text, level = "%s: no complete checkpoint under %s, starting afresh", logging.INFO
        if (moved := newest_moved(self.output_dir)) is not None:
            text += f"; to go on with the run that was moved aside: -o {KEY}={moved}"
        if moved is not None or self.checkpoints.steps():
            level = logging.WARNING
        logger.log(level, text, wanted, self.output_dir)

    def fit(self, data: RunData) -> int:
        """Runs updates until the end of the run; logs, evaluates and saves on the way, and saves at the end.

        Returns:
            The run's exit code: 0, or one of `failures.EXIT_…` if it was asked to stop early or a save failed.

        Raises:
            RunError: the loss or the gradient is not finite, or float16 skipped too many updates in a row.
            UserError: the checkpoint resumed from lies beyond the end of the run; nothing was changed.
        """
        data = data.continued(self.progress)
        if self.config.Engine.run_mode == "epoch":  # else the configuration has told
            for warning in ends_early(self.config.Optimizer.lr, data.num_updates, "the updates of these epochs,"):
                logger.info("warning: %s", warning)
        with prepared_output_dir(self):
            stop = StopRequests(self.context, self.output_dir, self.config.Engine.save_load.stop_after_s)
            return self._ending(self._fit(data, stop))

    def _fit(self, data: RunData, stop: StopRequests) -> str | None:
        """`fit` in a prepared folder; why the run stopped before the end, None if it did not."""
        with stop.listening():
            try:
                reason = self._run(data, stop)
                if self._saved_step != self.progress.step:
                    self.save(data)
                self.checkpoints.wait()
            except RunError:  # all ranks see it alike, so they can complete the save that is under way
                self.checkpoints.wait()
                raise
            except BaseException:
                self.checkpoints.wait(FAILURE_GRACE_S)
                raise
        return reason

    def _run(self, data: RunData, stop: StopRequests) -> str | None:
        """The loop; why it stopped before the end, None if it did not."""
        schedule = build_schedule(self.config.Optimizer.lr, data.num_updates)
        self.model.train()
        batches = data.train_batches(self.progress.consumed_samples)
        with contextlib.closing(batches), RunLog(self, data, schedule) as log:
            if self.progress.evaluation_due:  # a stop came before it, in the run that is resumed
                self._make_up_evaluation(data, log)
            for batch in itertools.islice(batches, data.num_updates - self.progress.step):
                try:
                    result = self._update(batch, data, schedule)
                except Exception as error:
                    error.step = self.progress.step + 1  # type: ignore[attr-defined]  # for the failure's record
                    raise
                log.after_update(result, batch.epoch)
                self.progress.evaluation_due = int(data.evaluates_after(self.progress))
                if self.progress.step < data.num_updates and (reason := stop.after_update(self.progress.step)):
                    return reason
                if self.progress.evaluation_due:
                    self._log_evaluation(data, log)
                if data.saves_after(self.progress):
                    with log.pause():
                        self.save(data)
        return None

    def _make_up_evaluation(self, data: RunData, log: RunLog) -> None:
        """Makes the evaluation that a stop left out, unless an earlier start has done so or it is switched off now."""
        step = self.progress.step
        made = self.context.rank0_first("look for the evaluation", lambda: log.has_evaluation(step))
        if data.evaluation is not None and not made:
            logger.info("the run was stopped before the evaluation after step %d: it is made now", step)
            self._log_evaluation(data, log)
        self.progress.evaluation_due = 0

    def _log_evaluation(self, data: RunData, log: RunLog) -> None:
        """Evaluates after the present update."""
        with log.pause():
            began = time.perf_counter()
            log.after_evaluation(*self.evaluate(data), time.perf_counter() - began)
        self.progress.evaluation_due = 0

    def _ending(self, stopped: str | None) -> int:
        """Says how the run ended, and gives its exit code."""
        step, failed = self.progress.step, self.checkpoints.failed
        if stopped is not None:
            first = ", with the evaluation that is due" if self.progress.evaluation_due else ""
            logger.info("stopped after step %d: %s; ckpt_dir=auto goes on from here%s", step, stopped, first)
        if failed:
            logger.error("saving failed at step %s: see above", ", ".join(map(str, failed)))
            return EXIT_SAVE_FAILED
        return EXIT_STOPPED if stopped is not None else 0

    def evaluate(self, data: RunData) -> tuple[float, int]:
        """(mean loss over the predicted tokens of the evaluation data, number of batches); every rank must call it."""
        self.model.eval()
        loss_sum = tokens = 0.0
        count = 0
        with contextlib.closing(data.evaluation_batches()) as batches:
            for batch in batches:
                sums = self.train_step.evaluate(batch)
                loss_sum, tokens, count = loss_sum + sums[0], tokens + sums[1], count + 1
        self.model.train()
        return loss_sum / max(tokens, 1.0), count

    def report_evaluation(self, data: RunData) -> None:
        """Evaluates the restored checkpoint and logs the result; every rank must call it.

        Raises:
            UserError: there is no checkpoint.
        """
        if self.resumed_from is None:
            rule = "evaluation needs a checkpoint"
            raise UserError(
                Problem(KEY, self.config.Engine.save_load.ckpt_dir, rule, f"-o {KEY}=auto, or a step_N folder")
            )
        self.train_step.will_evaluate(section_to_evaluate(self.config, data.evaluated))
        began = time.perf_counter()
        loss, batches = self.evaluate(data)
        cost_s = (time.perf_counter() - began) / max(batches, 1)
        kind, step = data.evaluated.lower(), self.progress.step
        record = EvalRecord(kind=kind, step=step, loss=loss, batches=batches, avg_batch_cost_s=cost_s)
        logger.info("%s", record.line())

    def save(self, data: RunData) -> None:
        """Starts to save a checkpoint of the present step, and waits for its end without `async_save`; every rank must call
        it. A failure is logged and shows in the exit code."""
        self.checkpoints.save(self.progress.step, resume.capture(self, data))
        self._saved_step = self.progress.step
        if not self.config.Engine.save_load.async_save:
            self.checkpoints.wait()

    def _update(self, batch: Batch, data: RunData, schedule: Schedule) -> StepResult:
        """One update, counted; `progress` moves only if it succeeds."""
        progress, step = self.progress, self.progress.step + 1
        rank = self.context.topology.device_rank
        fault = Fault(self.config.Debug.fault, rank, step)
        if self.config.Debug.log_sample_ids:
            every_rank.info("[sample_ids] step: %d, rank: %d, ids: %s", step, rank, batch.sample_ids.tolist())
        fault.strike(self.trainable)
        try:
            result = self.train_step.run(batch, schedule(progress.step - progress.skipped_steps), fault)
        except NotFinite as error:
            raise RunError(
                f"step {step}: {error}. The update was not made; the last checkpoint stands. "
                "Lower Optimizer.lr.max_lr, set Optimizer.grad_clip.clip_norm, or look at the samples with Debug.log_sample_ids"
            ) from None
        progress.step = step
        progress.consumed_samples = data.consumed_after(progress.consumed_samples)
        progress.skipped_in_row = 0 if result.applied else progress.skipped_in_row + 1
        progress.skipped_steps += not result.applied
        if progress.skipped_in_row >= self.config.Engine.max_skipped_steps:
            raise RunError(
                f"step {step}: float16 overflowed {progress.skipped_in_row} times in a row (Engine.max_skipped_steps); "
                "try Engine.mix_precision.dtype=bfloat16 or a lower learning rate"
            )
        return result
