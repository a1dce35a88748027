"""Trains the tiny model without checkpoints, in one process or as one of several, and notes what every rank saw.

`python sharding_worker.py RUNS FOLDER`, RUNS a JSON object {name: overrides}: the runs one after another in the same
processes; rank r leaves NAME.r.json and NAME.r.npz (its pieces of the weights). Tests call `run` for the one-process side.
"""

from __future__ import annotations

import collections
import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

from ppfleetx.config import load_config, rank_of_launch, world_size_of_launch
from ppfleetx.distributed import ParallelContext, get_rng_state_tracker, seed_streams
from ppfleetx.engine import command, open_data
from ppfleetx.engine.debug import Fault
from ppfleetx.engine.step import NotFinite, TrainStep, make_model, make_trainable
from ppfleetx.optim import build_optimizer
from ppfleetx.optim.optimizer import optimizer_state
from ppfleetx.optim.schedules import build_schedule
from tests.training import arguments

COUNTED = ("all_gather", "reduce_scatter")


def run(overrides: Sequence[str]) -> dict[str, Any]:
    """One run of `Engine.max_steps` updates, with an evaluation after every `eval_freq`.

    Returns, of this rank: `losses`, `grad_norms`, `evaluations`; `collectives` of each update by name; `seconds` of each;
    `elements` that it holds after the run; `pieces` of the weights; `stopped`, the update that was not finite.
    """
    options = command.parser("").parse_args(arguments(Path("unused"), *overrides))
    config = load_config(options.config, options.override, world_size_of_launch()).config
    topology = command.topology_of(config)
    context = ParallelContext.create(topology, config.Global.device)
    seed_streams(topology, config.Global.seed)
    tracker = get_rng_state_tracker()
    model = make_model(config, context, tracker)
    trainable = make_trainable(config, context, model)
    optimizer = build_optimizer(config, trainable.named)
    train_step = TrainStep(config, context, model, trainable, optimizer)
    data = open_data(config, topology)
    schedule = build_schedule(config.Optimizer.lr, data.num_updates)
    seen: dict[str, Any] = {key: [] for key in ("losses", "grad_norms", "evaluations", "collectives", "seconds")}
    seen["stopped"] = None
    model.train()
    with contextlib.closing(data.train_batches(0)) as batches:
        for step in range(1, data.num_updates + 1):
            batch, began = next(batches), time.perf_counter()
            fault = Fault(config.Debug.fault, topology.device_rank, step)
            fault.strike(trainable)
            try:
                with counted() as counts:
                    result = train_step.run(batch, schedule(step - 1), fault)
            except NotFinite:
                seen["stopped"] = step
                break
            seen["seconds"].append(time.perf_counter() - began)
            seen["losses"].append(result.loss)
            seen["grad_norms"].append(result.grad_norm)
            seen["collectives"].append(dict(counts))
            if config.Engine.eval_freq and step % config.Engine.eval_freq == 0:
                model.eval()
                seen["evaluations"] += [train_step.evaluate(batch)[0] for batch in data.evaluation_batches()]
                model.train()
    state = optimizer_state(optimizer, trainable.named)
    seen["elements"] = {
        "model": sum(parameter.size for parameter in model.parameters() if parameter._is_initialized()),
        "updated": sum(tensor.size for tensor in trainable.named.values()),
        "optimizer": sum(tensor.size for tensor in state.values()),
    }
    seen["pieces"] = [(p.name, p.box, p.flat, p.is_mine, p.tensor.numpy()) for p in trainable.pieces()]
    return seen


@contextlib.contextmanager
def counted() -> Iterator[collections.Counter[str]]:
    """Counts the calls of the two collectives of sharding."""
    counts: collections.Counter[str] = collections.Counter()
    originals = {name: getattr(dist.stream, name) for name in COUNTED}

    def counting(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return originals[name](*args, **kwargs)

        return call

    for name in COUNTED:
        setattr(dist.stream, name, counting(name))
    try:
        yield counts
    finally:
        for name, original in originals.items():
            setattr(dist.stream, name, original)


def assemble(pieces: Sequence[tuple[str, Any, Any, bool, np.ndarray]]) -> dict[str, np.ndarray]:
    """The whole weights from every rank's pieces: each element must come once from a first copy, and copies be equal."""
    shapes: dict[str, list[int]] = {}
    for name, box, *_ in pieces:
        stops = [stop for _, stop in box]
        shapes[name] = [max(pair) for pair in zip(stops, shapes.get(name, stops), strict=True)]
    whole = {name: np.full(shape, np.nan, np.float32) for name, shape in shapes.items()}
    for first in (True, False):
        for name, box, flat, is_first, values in pieces:
            if is_first != first:
                continue
            place = tuple(slice(*edges) for edges in box)
            part = whole[name][place].flatten()
            run_of = slice(*flat) if flat is not None else slice(None)
            if first:
                assert np.isnan(part[run_of]).all(), f"{name}: two first copies of {box} {flat}"
                part[run_of] = values.flatten()
                whole[name][place] = part.reshape(whole[name][place].shape)
            else:
                assert np.array_equal(part[run_of], values.flatten()), f"{name}: copies differ"
    assert not any(np.isnan(values).any() for values in whole.values())
    return whole


def main() -> None:
    """The runs of the command line."""
    runs, folder, rank = json.loads(sys.argv[1]), Path(sys.argv[2]), rank_of_launch()
    for name, overrides in runs.items():
        seen = run(overrides)
        pieces = seen.pop("pieces")
        seen["pieces"] = [piece[:4] for piece in pieces]
        (folder / f"{name}.{rank}.json").write_text(json.dumps(seen))
        np.savez(folder / f"{name}.{rank}.npz", *[piece[4] for piece in pieces])


if __name__ == "__main__":
    paddle.set_device("cpu")
    main()
