"""The data of a run: datasets of the config, batches of this data rank, and how many updates they make."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Generator
from dataclasses import dataclass

from ppfleetx.config import Config, Problem, UserError
from ppfleetx.config.load import find_path
from ppfleetx.config.schema import SplitConfig
from ppfleetx.data import (
    Batch,
    Corpus,
    DatasetSpec,
    GlobalBatchSampler,
    GPTDataset,
    load_batches,
    open_corpus,
)
from ppfleetx.distributed import Topology
from ppfleetx.engine.progress import Progress

#: samples that the hash of the next ones tells of
NEXT_SAMPLES = 32

logger = logging.getLogger("ppfleetx")


@dataclass(frozen=True)
class RunData:
    """Datasets and counts.

    Attributes:
        train: the training samples, endless.
        evaluation: the evaluation samples; None where evaluation is off.
        evaluated: the section of `Data` that they are of, "Eval" or "Test".
        num_samples: training samples of the run; None: as many as max_steps needs.
        num_updates: updates of the run; of one that resumes, the earlier ones included.
    """

    config: Config
    topology: Topology
    train: GPTDataset
    evaluation: GPTDataset | None
    num_samples: int | None
    num_updates: int
    evaluated: str

    def continued(self, progress: Progress) -> RunData:
        """The same data for a run that goes on at `progress`: what earlier updates read is read, whatever their batch size.

        Raises:
            UserError: the checkpoint lies beyond the end of the run.
        """
        engine, end = self.config.Engine, self.num_updates
        if self.num_samples is not None:
            end = progress.step + _updates(self.config, max(self.num_samples - progress.consumed_samples, 0))
            end = end if engine.max_steps < 0 else min(end, engine.max_steps)
            if progress.consumed_samples > self.num_samples:
                rule = (
                    f"these epochs hold {self.num_samples} samples; the checkpoint is at sample {progress.consumed_samples}"
                    " already, beyond this run's end"
                )
                fix = "raise it, or name an earlier step_N folder"
                raise UserError(Problem("Engine.num_train_epochs", engine.num_train_epochs, rule, fix))
        if progress.step > end:
            rule = f"the checkpoint is at step {progress.step} already, beyond this run's end"
            raise UserError(Problem("Engine.max_steps", end, rule, "raise it, or name an earlier step_N folder"))
        if end != self.num_updates:
            logger.info("earlier updates were of another size: this run ends after update %d", end)
        return dataclasses.replace(self, num_updates=end)

    def next_samples(self, consumed: int) -> str:
        """A hash of which samples come after `consumed` ones: the corpus and the places in it of the following few."""
        places = [self.train.place_of(index) for index in range(consumed, consumed + NEXT_SAMPLES)]
        return hashlib.sha256(repr((self.train.corpus.mark, places)).encode()).hexdigest()[:12]

    def train_batches(self, consumed: int) -> Generator[Batch, None, None]:
        """This rank's parts of the global batches after `consumed` samples."""
        split = self.config.Data.Train
        assert split is not None
        sampler = self._sampler(self.num_samples, split.sampler.drop_last)
        return load_batches(self.train, sampler, consumed, split.loader.num_workers)

    def evaluation_batches(self) -> Generator[Batch, None, None]:
        """This rank's parts of the batches of one evaluation: the same ones each time, a partial last one padded."""
        split = getattr(self.config.Data, self.evaluated)
        assert self.evaluation is not None
        wanted = num_batches(self.config, self.evaluated) * self.config.derived.global_batch_size
        sampler = self._sampler(min(wanted, self.evaluation.num_samples()), drop_last=False)
        return load_batches(self.evaluation, sampler, num_workers=split.loader.num_workers)

    def consumed_after(self, consumed: int) -> int:
        """The position after the batch at `consumed`."""
        after = consumed + self.config.derived.global_batch_size
        return after if self.num_samples is None else min(after, self.num_samples)

    def evaluates_after(self, progress: Progress) -> bool:
        """Whether an evaluation is due after the present update."""
        return self.evaluation is not None and self._due(progress, self.config.Engine.eval_freq)

    def saves_after(self, progress: Progress) -> bool:
        """Whether a checkpoint is due after the present update."""
        derived = self.config.derived
        if derived.save_steps is not None and progress.step % derived.save_steps == 0:
            return True
        by_epoch = self.config.Engine.run_mode == "epoch" and derived.save_epoch is not None
        return by_epoch and self._due(progress, derived.save_epoch)

    def _due(self, progress: Progress, freq: int) -> bool:
        """Every `freq` updates, or, with run_mode epoch, whenever another `freq` epochs are complete."""
        if self.config.Engine.run_mode == "step":
            return progress.step % freq == 0
        before = max(progress.consumed_samples - self.config.derived.global_batch_size, 0)
        return self._epochs(progress.consumed_samples) // freq > self._epochs(before) // freq

    def _epochs(self, consumed: int) -> int:
        """Epochs complete after `consumed` samples: the epoch that the next sample belongs to."""
        return self.train.epoch_of(consumed)

    def _sampler(self, num_samples: int | None, drop_last: bool) -> GlobalBatchSampler:
        data = self.topology.data_info
        return GlobalBatchSampler(self.config.derived.global_batch_size, data.rank, data.size, num_samples, drop_last)


def open_data(config: Config, topology: Topology, evaluated: str | None = None) -> RunData:
    """Opens what the run reads.

    Args:
        evaluated: "Eval" or "Test": what tools/eval.py evaluates; None: training, which evaluates `Data.Eval` if that is on.

    Raises:
        UserError: a corpus is missing, broken, too small or does not fit the vocabulary, its data come from another tokenizer
            than the training data, or there is nothing to evaluate where that was asked for.
    """
    assert config.Data.Train is not None
    train = GPTDataset(_spec(config, config.Data.Train, "Train"))
    evaluation = None
    if evaluated is not None or evaluates(config):
        mode = evaluated or "Eval"
        evaluation = GPTDataset(_spec(config, section_to_evaluate(config, mode), mode))
        _check_one_tokenizer(config, train, evaluation.corpus, mode)
    if evaluated is None and config.Data.Test is not None:  # for later: only that it is there, its share may be empty
        corpus = open_corpus(find_path(config.Data.Test.dataset.input_dir), "Data.Test.dataset.input_dir")
        _check_one_tokenizer(config, train, corpus, "Test")
    num_samples, num_updates = _length(config, train)
    batch = config.derived.global_batch_size
    read = num_updates * batch if num_samples is None else min(num_samples, num_updates * batch)
    logger.info(
        "training data: %s documents, %s samples an epoch; %s updates of %s samples read %s samples, %.2f epochs%s",
        f"{train.corpus.num_documents:,}", f"{train.num_samples():,}", f"{num_updates:,}", batch, f"{read:,}",
        read / train.num_samples(), " (the data repeats)" if read > train.num_samples() else "",
    )  # fmt: skip
    logger.info("training reads %s", train.describe())
    if evaluation is not None:
        logger.info("evaluation reads %s%s", evaluation.describe(), _hint(train, evaluation))
    return RunData(config, topology, train, evaluation, num_samples, num_updates, evaluated or "Eval")


def _hint(train: GPTDataset, evaluation: GPTDataset) -> str:
    """What may make the losses of training and evaluation differ, or nothing."""
    one_corpus = [file.prefix for file in train.corpus.files] == [file.prefix for file in evaluation.corpus.files]
    if not (one_corpus and train.corpus.in_input_order and evaluation.documents.start >= train.documents.stop):
        return ""
    return (
        "; these are the last in the order of the input and may be unlike the others:"
        " tools/preprocess_data.py --shuffle SEED mixes them"
    )


def evaluates(config: Config) -> bool:
    """Whether training evaluates."""
    return config.Engine.eval_freq > 0 and config.Engine.eval_iters > 0 and config.Data.Eval is not None


def num_batches(config: Config, evaluated: str) -> int:
    """Global batches of one evaluation of `Data.Eval` or `Data.Test`, unless there are less data."""
    return config.Engine.eval_iters if evaluated == "Eval" else config.derived.test_iters


def section_to_evaluate(config: Config, evaluated: str) -> SplitConfig:
    """The section `Data.Eval` or `Data.Test`.

    Raises:
        UserError: there is none, or no batch of it is to be evaluated.
    """
    split: SplitConfig | None = getattr(config.Data, evaluated)
    if split is None:
        assert config.Data.Train is not None
        key, dataset = f"Data.{evaluated}", config.Data.Train.dataset
        rule = f"tools/eval.py --split {evaluated.lower()} evaluates these data, and there are none"
        length, shares = (
            f"{key}.dataset.max_seq_len={dataset.max_seq_len}",
            "[0,1,0]" if evaluated == "Eval" else "[0,0,1]",
        )
        fix = f"for a corpus of its own: -o {key}.dataset.input_dir=… {length} {key}.dataset.split={shares}"
        raise UserError(Problem(key, None, rule, fix))
    if num_batches(config, evaluated) == 0:
        key = f"Engine.{evaluated.lower()}_iters"
        raise UserError(Problem(key, 0, "so many global batches are evaluated: it must be at least 1", f"-o {key}=10"))
    return split


def _check_one_tokenizer(config: Config, train: GPTDataset, corpus: Corpus, mode: str) -> None:
    """Refuses evaluation on ids that mean other text than those that are learned."""
    made_by = {train.corpus.tokenizer_sha256, corpus.tokenizer_sha256} - {None}
    if len(made_by) > 1:
        rule = f"it must come from the tokenizer of the training data, {train.spec.input_dir}, and comes from another"
        fix = "tokenize both with the same tokenizer"
        value = getattr(config.Data, mode).dataset.input_dir
        raise UserError(Problem(f"Data.{mode}.dataset.input_dir", value, rule, fix))


def _length(config: Config, train: GPTDataset) -> tuple[int | None, int]:
    """(samples of the run or None for endless, updates of the run)."""
    engine = config.Engine
    if engine.run_mode == "step":
        return None, engine.max_steps
    assert config.Data.Train is not None
    num_samples = train.num_samples(engine.num_train_epochs)
    batch, num_updates = config.derived.global_batch_size, _updates(config, num_samples)
    if num_updates == 0:
        rule = f"{engine.num_train_epochs} epochs hold {num_samples} samples, less than one global batch of {batch}"
        raise UserError(
            Problem("Engine.num_train_epochs", engine.num_train_epochs, rule, "-o Data.Train.sampler.drop_last=false")
        )
    return num_samples, num_updates if engine.max_steps < 0 else min(num_updates, engine.max_steps)


def _updates(config: Config, num_samples: int) -> int:
    """Updates that read so many samples."""
    assert config.Data.Train is not None
    batch = config.derived.global_batch_size
    return num_samples // batch if config.Data.Train.sampler.drop_last else -(-num_samples // batch)


def _spec(config: Config, split: SplitConfig, mode: str) -> DatasetSpec:
    dataset = split.dataset
    return DatasetSpec(
        input_dir=str(find_path(dataset.input_dir)),
        split=dataset.split,
        mode=mode,
        seq_len=dataset.max_seq_len,
        seed=config.Global.seed,
        vocab_size=config.Model.vocab_size,
        eos_id=dataset.eos_id,
    )
