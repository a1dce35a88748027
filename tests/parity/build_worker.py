"""Builds a model as tools/train.py does and prints what it took, in bytes of the allocator: BUILT {peak, held, shard, …}."""

from __future__ import annotations

import json
import sys

import paddle

from ppfleetx.config import load_config
from ppfleetx.distributed import ParallelContext, get_rng_state_tracker, seed_streams
from ppfleetx.engine import command, make_model, make_trainable
from ppfleetx.layers.parameter import logical_parameters

statistic = paddle.base.core.host_memory_stat_current_value, paddle.base.core.host_memory_stat_peak_value

options = command.parser("").parse_args(sys.argv[1:])
config = load_config(options.config, options.override, 4).config
topology = command.topology_of(config)
with ParallelContext.create(topology, "cpu") as context:
    seed_streams(topology, config.Global.seed)
    before = statistic[0]("Allocated", 0)
    model = make_model(config, context, get_rng_state_tracker())
    unfilled = statistic[0]("Allocated", 0) - before
    largest = max(4 * parameter.size for parameter in logical_parameters(model).values())
    trainable = make_trainable(config, context, model)
    held, peak = (one("Allocated", 0) - before for one in statistic)
    shard = sum(4 * piece.tensor.size for piece in trainable.pieces())
    total = sum(float(piece.tensor.astype("float64").square().sum()) for piece in trainable.pieces())
    built = {"unfilled": unfilled, "peak": peak, "held": held, "shard": shard, "largest": largest, "squares": total}
    print("BUILT", json.dumps(built), flush=True)
