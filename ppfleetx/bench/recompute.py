"""What recomputation saves: peak memory of an update by what is recomputed, on a CPU in one process."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import numpy as np
from paddle.base import core

from ppfleetx.bench.engine import BASE, SETTINGS
from ppfleetx.config import Config, load_config
from ppfleetx.data import Batch
from ppfleetx.distributed import ParallelContext, get_rng_state_tracker, seed_streams
from ppfleetx.distributed.cpu import set_threads
from ppfleetx.engine import command, make_trainable
from ppfleetx.engine.debug import Fault
from ppfleetx.engine.step import TrainStep
from ppfleetx.metrics.memory import peak_memory_bytes
from ppfleetx.models.registry import build_model
from ppfleetx.optim import build_optimizer

#: from what keeps most to what keeps least
GRANULARITIES = ("none", "core_attn", "full_attn", "full")
_MIB = 2**20


def measure_recompute(overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Two updates of each kind, of which the second is measured; the result as JSON values.

    Args:
        overrides: `Key.sub=value` over the settings of the engine's benchmark.

    Raises:
        UserError: the configuration cannot be used.
    """
    results = {}
    for granularity in GRANULARITIES:
        on = granularity != "none"
        kind = (f"Model.use_recompute={on}", *([f"Model.recompute_granularity={granularity}"] if on else []))
        config = load_config([str(BASE)], [*SETTINGS, *overrides, *kind]).config
        results[granularity] = _measure(config)
    return {"settings": [*SETTINGS, *overrides], "kinds": results}


def recompute_lines(result: dict[str, Any]) -> list[str]:
    """The result for a reader."""
    kinds = result["kinds"]
    lines = [" ".join(result["settings"]), "recomputed  peak MiB  above the state  of none  loss"]
    for name, one in kinds.items():
        share = one["activation_bytes"] / kinds["none"]["activation_bytes"]
        peak, above = one["peak_bytes"] / _MIB, one["activation_bytes"] / _MIB
        lines.append(f"{name:10}  {peak:8.1f}  {above:15.1f}  {share:7.0%}  {one['loss']:.9f}")
    least = kinds["full"]["activation_bytes"] / kinds["none"]["activation_bytes"]
    return [*lines, f"activations and gradients with full / without = {least:.3f}"]


def _measure(config: Config) -> dict[str, float]:
    """The second of two updates.

    Returns: `peak_bytes`, most bytes of tensors live at once; `activation_bytes`, of these beyond weights and optimizer states,
    which are activations and gradients; `loss`.
    """
    set_threads(config)
    topology = command.topology_of(config)
    with ParallelContext.create(topology, config.Global.device) as context:
        seed_streams(topology, config.Global.seed)
        gc.collect()
        others = _live_bytes()
        model = build_model(config, get_rng_state_tracker())
        trainable = make_trainable(config, context, model)
        optimizer = build_optimizer(config, trainable.named)
        train_step = TrainStep(config, context, model, trainable, optimizer)
        batch, rate = _random_batch(config), config.Optimizer.lr.max_lr
        train_step.run(batch, rate, Fault(None, 0, 1))  # makes the moments
        gc.collect()
        state = _live_bytes()
        core.host_memory_stat_reset_peak_value("Allocated", 0)
        result = train_step.run(batch, rate, Fault(None, 0, 2))
        peak = peak_memory_bytes("cpu")
        assert peak is not None
        return {"peak_bytes": peak - others, "activation_bytes": peak - state, "loss": result.loss}


def _random_batch(config: Config) -> Batch:
    assert config.Data.Train is not None
    rows, length = config.derived.local_batch_size, config.Data.Train.dataset.max_seq_len
    ids = np.random.default_rng(0).integers(0, config.Model.vocab_size, [rows, length + 1])
    mask = np.ones([rows, length], np.float32)
    return Batch(ids[:, :-1], ids[:, 1:], mask, np.arange(rows), 0)


def _live_bytes() -> int:
    return int(core.host_memory_stat_current_value("Allocated", 0))
