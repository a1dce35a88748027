"""What the engine adds to a step: `Engine.fit` beside a bare Paddle loop over the same model, weights and samples.

Both run in one process and take turns, a round each. The engine's run is one ordinary `fit` (files, prefetch, log,
VisualDL); its stream of batches stands still between rounds, and the bare loop runs meanwhile.

Shapes: b batch, s sequence, V vocabulary.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn

from ppfleetx.bench import LOGGING_FREQ
from ppfleetx.config import Config, load_config
from ppfleetx.data import Batch, CorpusWriter
from ppfleetx.distributed import ParallelContext, RNGStatesTracker, get_rng_state_tracker, seed_streams
from ppfleetx.distributed.cpu import set_threads
from ppfleetx.engine import Engine, RunData, command, make_trainable, open_data
from ppfleetx.metrics.console import setup_logging
from ppfleetx.models.registry import build_model
from ppfleetx.optim import build_optimizer

#: untimed updates of either at the start; the first ones allocate and make the optimizer's moments
WARM_UP = LOGGING_FREQ
BASE = Path(__file__).parents[1] / "configs/nlp/gpt/pretrain_gpt_base.yaml"

#: over the recipes' base, dropout and all: GPT of 4 layers, 256 wide, 8 samples of 256 tokens an update
SETTINGS = (
    "Global.device=cpu", "Global.local_batch_size=8", "Global.micro_batch_size=8",
    f"Engine.logging_freq={LOGGING_FREQ}", "Engine.eval_freq=0", "Engine.save_load.save_steps=-1",
    "Engine.mix_precision.enable=false", "Model.vocab_size=256", "Model.vocab_size_divisible_unit=1",
    "Model.hidden_size=256", "Model.num_layers=4", "Model.num_attention_heads=4", "Model.max_position_embeddings=256",
    "Data.Train.dataset.max_seq_len=256", "Data.Train.dataset.split=[1, 0, 0]", "Data.Eval=null",
    "Optimizer.lr.name=ConstantWithWarmup", "Optimizer.lr.warmup_rate=0", "Optimizer.lr.max_lr=1.0e-3",
)  # fmt: skip


class Time(NamedTuple):
    """What an update took: on the clock, and of all processors together."""

    wall_s: float
    cpu_s: float


def measure_engine(folder: Path, rounds: int, steps: int, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Runs both, `rounds` rounds of `steps` updates each; the result as JSON values.

    Args:
        folder: empty; gets the corpus and the engine's run.
        steps: a multiple of LOGGING_FREQ, so that every round holds its share of log lines.
        overrides: `Key.sub=value` over SETTINGS.

    Raises:
        UserError: the configuration cannot be used.
    """
    assert steps % LOGGING_FREQ == 0
    num_updates = WARM_UP + rounds * steps
    paths = (f"Data.Train.dataset.input_dir={folder / 'data'}", f"Engine.save_load.output_dir={folder / 'run'}")
    loaded = load_config([str(BASE)], [*SETTINGS, f"Engine.max_steps={num_updates + 1}", *paths, *overrides])
    config = loaded.config
    _write_corpus(folder / "data/corpus", config, num_updates + 1)
    with open(folder / "console.txt", "w", encoding="utf-8") as console, contextlib.redirect_stdout(console):
        setup_logging(is_main=True)
        use = set_threads(config)
        engine_times, bare_times, bare_losses = _alternate(config, rounds, steps)
    records = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    windows = np.reshape(bare_losses, [-1, LOGGING_FREQ]).mean(axis=1)
    train = [record["loss"] for record in records if record["kind"] == "train"]
    engine_losses = train[: len(windows)]  # the last one is that of the update after the rounds
    return {
        "settings": [*SETTINGS, *overrides],
        "cpu": str(use),
        "rounds": [_compare(*pair) for pair in zip(engine_times[1:], bare_times[1:], strict=True)],
        "losses_engine": engine_losses,
        "losses_bare": windows.tolist(),
        "max_loss_difference": float(np.abs(np.array(engine_losses) - windows).max()),
    }


def engine_lines(result: dict[str, Any]) -> list[str]:
    """The result for a reader."""
    rounds = result["rounds"]
    lines = [
        " ".join(result["settings"]),
        f"both: {result['cpu']}",
        "       seconds a step (median)   ratio                    ratio of CPU time",
    ]
    lines.append("round  engine      bare        of medians  whole round  of medians  whole round")
    row = "{:5}  {engine_s:<10.4f}  {bare_s:<10.4f}  "
    row += "{ratio:<10.3f}  {ratio_whole:<11.3f}  {ratio_cpu:<10.3f}  {ratio_whole_cpu:.3f}"
    lines += [row.format(number, **one) for number, one in enumerate(rounds, start=1)]
    middle = {key: median(one[key] for one in rounds) for key in rounds[0]}
    losses = result["losses_engine"]
    return [
        *lines,
        row.format("all", **middle),
        f"losses {losses[0]:.4f} to {losses[-1]:.4f}, means of {LOGGING_FREQ} updates; "
        f"largest difference {result['max_loss_difference']:.1e}",
        f"engine / bare = {middle['ratio']:.3f} (budget 1.03)",
    ]


def _compare(engine: list[Time], bare: list[Time]) -> dict[str, float]:
    """One round. `ratio`: of the median steps, which leave out log lines and hiccups; `_whole`: of the sums; `_cpu`: in
    processor time of all threads, which a busy machine disturbs less."""
    result: dict[str, float] = {}
    for clock, suffix in (("wall_s", ""), ("cpu_s", "_cpu")):
        ours, theirs = ([getattr(time, clock) for time in times] for times in (engine, bare))
        result |= {
            f"engine_s{suffix}": median(ours),
            f"bare_s{suffix}": median(theirs),
            f"ratio{suffix}": median(ours) / median(theirs),
            f"ratio_whole{suffix}": sum(ours) / sum(theirs),
        }
    return result


def _now() -> Time:
    return Time(time.perf_counter(), time.process_time())


def _since(began: Time) -> Time:
    now = _now()
    return Time(now.wall_s - began.wall_s, now.cpu_s - began.cpu_s)


def _alternate(config: Config, rounds: int, steps: int) -> tuple[list[list[Time]], list[list[Time]], list[float]]:
    """(times of the engine's updates by round, of the bare loop's, losses of the bare loop); the warm-up comes first."""
    topology = command.topology_of(config)
    with ParallelContext.create(topology, config.Global.device) as context:
        seed_streams(topology, config.Global.seed)
        tracker = get_rng_state_tracker()
        model = build_model(config, tracker)
        trainable = make_trainable(config, context, model)
        engine = Engine(config, context, tracker, model, trainable, build_optimizer(config, trainable.named))
        data = open_data(config, topology)
        bare = _BareLoop(config, tracker, build_model(config, tracker), data.train_batches(0))
        times: list[list[Time]] = []
        engine.fit(_Alternated(**vars(data), rounds=rounds, steps=steps, bare_round=bare.round, times=times))
        return times, bare.times, [float(loss) for loss in bare.losses]


@dataclass(frozen=True)
class _Alternated(RunData):
    """The engine's data, which notes when a batch is asked for and lets the bare loop run between the engine's rounds.

    Attributes:
        rounds, steps: rounds, and updates of one.
        bare_round: runs a round of that many updates.
        times: filled with the time of every update by round; fetching, update, log line.
    """

    rounds: int
    steps: int
    bare_round: Callable[[int], None]
    times: list[list[Time]]

    def train_batches(self, consumed: int) -> Generator[Batch, None, None]:
        with contextlib.closing(super().train_batches(consumed)) as batches:
            for number, steps in enumerate([WARM_UP, *[self.steps] * self.rounds]):
                bare_first = number % 2 == 1  # they swap places every round, so that a drift of the machine cancels
                if bare_first:
                    self.bare_round(steps)
                times: list[Time] = []
                for _ in range(steps):
                    began = _now()
                    yield next(batches)
                    times.append(_since(began))  # the engine is back, asking for another
                self.times.append(times)
                if not bare_first:
                    self.bare_round(steps)
            yield next(batches)  # one more update, so that the engine comes back after the last round's last one


class _BareLoop:
    """Training as a user of Paddle writes it, without any service.

    Args:
        config: sizes and the optimizer's values.
        tracker: the streams, just seeded: dropout draws what the engine's run draws.
        model: ids int64 [b, s] → logits [s, b, V].
        batches: read at once, so that the loop finds its arrays in memory.
    """

    def __init__(
        self, config: Config, tracker: RNGStatesTracker, model: nn.Layer, batches: Generator[Batch, None, None]
    ):
        section = config.Optimizer
        assert section.grad_clip is not None
        decayed = {parameter.name for parameter in model.parameters() if parameter.spec.decay}
        self.model = model
        self.optimizer = paddle.optimizer.AdamW(
            section.lr.max_lr, config.derived.beta1, config.derived.beta2, section.epsilon, model.parameters(),
            section.weight_decay, apply_decay_param_fun=decayed.__contains__,
            grad_clip=nn.ClipGradByGlobalNorm(section.grad_clip.clip_norm),
        )  # fmt: skip
        with contextlib.closing(batches):
            taken = itertools.islice(batches, config.Engine.max_steps - 1)
            self._arrays = iter([(batch.ids, np.ascontiguousarray(batch.labels.T)) for batch in taken])
        self._tracker, self._streams = tracker, tracker.state_dict()
        self.times: list[list[Time]] = []
        self.losses: list[paddle.Tensor] = []

    def round(self, steps: int) -> None:
        """That many updates, with this loop's own random streams; the engine's are put back."""
        others = self._tracker.state_dict()
        self._tracker.load_state_dict(self._streams)
        self.times.append([self._timed_step(number) for number in range(steps)])
        self._streams = self._tracker.state_dict()
        self._tracker.load_state_dict(others)

    def _timed_step(self, number: int) -> Time:
        began = _now()
        ids, labels = next(self._arrays)
        logits = self.model(paddle.to_tensor(ids))
        loss = F.cross_entropy(logits, paddle.to_tensor(labels))
        loss.backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        if (number + 1) % LOGGING_FREQ == 0:
            float(loss)
        elapsed = _since(began)
        self.losses.append(loss.detach())
        return elapsed


def _write_corpus(prefix: Path, config: Config, num_updates: int) -> None:
    """Random ids, just enough for one epoch of the run."""
    assert config.Data.Train is not None
    num_tokens = num_updates * config.derived.global_batch_size * config.Data.Train.dataset.max_seq_len + 1
    ids = np.random.default_rng(0).integers(0, config.Model.vocab_size, num_tokens)
    with CorpusWriter(prefix, "megatron", config.Model.vocab_size) as writer:
        writer.append(ids)
