"""What each process of test_processes.py runs: `worker.py SCENE`. A failed assertion ends the launch with code 1."""

from __future__ import annotations

import os
import random
import sys
import time

import numpy as np
import paddle
import paddle.distributed as dist

from ppfleetx.config.errors import EXIT_USER_ERROR, Problem, UserError
from ppfleetx.distributed import (
    AXES,
    ParallelContext,
    Topology,
    all_gather_ints,
    all_reduce_sum_,
    average_gradients,
    broadcast_,
    get_rng_state_tracker,
    seed_streams,
)

RANK, WORLD = int(os.environ["PADDLE_TRAINER_ID"]), int(os.environ["PADDLE_TRAINERS_NUM"])

LAYOUTS = [
    ({"dp_degree": 4}, AXES),
    ({"mp_degree": 2, "pp_degree": 2}, AXES),
    ({"mp_degree": 2, "pp_degree": 2}, ("mp", "sep", "sharding", "pp", "dp")),
    ({"sharding_degree": 2}, ("sharding", "dp", "pp", "mp", "sep")),
    ({"sep_degree": 2}, ("sep", "mp", "pp", "dp", "sharding")),
    ({"sep_degree": 2, "mp_degree": 2}, AXES),
    ({"pp_degree": 4}, AXES),
]


def all_layouts() -> None:
    for degrees, order in LAYOUTS:
        topology = Topology(RANK, WORLD, order=order, **degrees)
        context = ParallelContext.create(topology)
        for axis in AXES:
            info, group = getattr(topology, f"{axis}_info"), context.group(axis)
            if info.size == 1:
                assert group is None
                continue
            assert list(group.ranks) == info.world and group.rank == info.rank
            assert all_gather_ints([RANK, 7], group) == [[rank, 7] for rank in info.world]
        streams(topology)
    fleet_strategy()
    collectives(context)
    gradients()
    endings(context)
    print("all layouts done")


def streams(topology: Topology) -> None:
    """Dropout under the global stream is equal over mp and different elsewhere; under the local one, different."""
    own = seed_streams(topology, 1024)
    tracker, drawn = get_rng_state_tracker(), {}
    for name in ("global_seed", "local_seed"):
        with tracker.rng_state(name):
            drawn[name] = paddle.randint(0, 2**30, [1]).item()
    everyone = all_gather_ints([own.global_seed, drawn["global_seed"], drawn["local_seed"]], dist.get_group(0))
    for seed, value, local in everyone:
        assert (seed == own.global_seed) == (value == drawn["global_seed"])
        assert (local == drawn["local_seed"]) == ([seed, value, local] == everyone[RANK])


def fleet_strategy() -> None:
    from paddle.distributed import fleet

    hybrid = fleet.fleet._user_defined_strategy.hybrid_configs
    assert hybrid["split_norm_comm"] and not hybrid["mp_configs"].need_broadcast_data


def collectives(context: ParallelContext) -> None:
    group = context.group("pp")  # all four ranks
    for dtype in ("float32", "float64", "int64"):
        value = paddle.arange(5).astype(dtype) + RANK
        assert all_reduce_sum_(value, group).tolist() == [4 * i + 6 for i in range(5)]
        value = paddle.full([3], RANK, dtype)
        assert broadcast_(value, group, source=2).tolist() == [2, 2, 2]
    assert all_reduce_sum_(value, None) is value and broadcast_(value, None) is value
    assert all_gather_ints([3], None) == [[3]]
    gathered: list = []
    dist.all_gather(gathered, paddle.full([2], float(RANK)), group=group)
    assert [one.tolist() for one in gathered] == [[float(rank)] * 2 for rank in range(4)]
    dist.barrier(group)


def gradients() -> None:
    """dp 4: parameters with a gradient everywhere, on one rank, nowhere; frozen; two dtypes; several buckets."""
    group = ParallelContext.create(Topology(RANK, WORLD)).data_group
    for bucket_bytes in (1, 64, 2**20):
        for scale in (None, 0.5):
            parameters = make_parameters()
            gradients_before = [parameter.grad for parameter in parameters]
            average_gradients(parameters, group, scale=scale, bucket_bytes=bucket_bytes)
            factor = 0.25 if scale is None else scale
            for i, parameter in enumerate(parameters):
                expected = sum(np.float64(gradient_of(i, rank)) for rank in range(4)) * factor
                if i == UNUSED:
                    assert parameter.grad is None
                elif i == FROZEN:
                    assert parameter.grad.tolist() == np.float32(gradient_of(i, RANK)).tolist()
                else:
                    assert parameter.grad.dtype == parameter.dtype and parameter.grad.shape == parameter.shape
                    np.testing.assert_allclose(parameter.grad.numpy(), expected, rtol=1e-6, atol=1e-6)
                if gradients_before[i] is not None:  # the tensor that an optimizer may hold is the one that changed
                    assert gradients_before[i].data_ptr() == parameter.grad.data_ptr()


SHAPES = [[3, 4], [5], [2, 2], [], [7], [1]]
UNUSED, FROZEN, ONLY_ON_RANK_2, DOUBLE = 1, 2, 4, 5


def gradient_of(i: int, rank: int) -> np.ndarray:
    """Gradient of parameter i on a rank; zeros where it has none."""
    if i == UNUSED or (i == ONLY_ON_RANK_2 and rank != 2):
        return np.zeros(SHAPES[i])
    return np.random.default_rng([i, rank]).standard_normal(SHAPES[i])


def make_parameters() -> list:
    parameters = []
    for i, shape in enumerate(SHAPES):
        dtype = "float64" if i == DOUBLE else "float32"
        parameter = paddle.create_parameter(shape, dtype)
        if i != UNUSED and (i != ONLY_ON_RANK_2 or RANK == 2):
            parameter.grad = paddle.to_tensor(gradient_of(i, RANK).astype(dtype))
        parameter.stop_gradient = i == FROZEN
        parameters.append(parameter)
    return parameters


def endings(context: ParallelContext) -> None:
    """Errors that one rank sees, long work of rank 0, and ends at different times."""
    context.agree(None)
    try:
        context.agree(UserError(Problem("k", RANK, "r")) if RANK in (1, 3) else None)
        raise AssertionError("agreed on nothing")
    except UserError as error:
        assert str(error) == "k = 1\n  rule: r"
    assert context.together(lambda: RANK) == RANK
    try:
        context.together(lambda: refuse() if RANK == 3 else RANK)
        raise AssertionError("together in spite of an error")
    except UserError as error:
        assert str(error) == "k = 3\n  rule: r"
    start = time.monotonic()
    assert context.rank0_first("slow", lambda: time.sleep(0.3) or 5) == 5
    assert time.monotonic() - start > 0.25
    with context:
        time.sleep([0, 0.3, 1.2, 0][RANK])
        if RANK == 2:
            context._meetings._store.count("still served")


def refuse() -> None:
    raise UserError(Problem("k", RANK, "r"))


def user_error() -> None:
    context = ParallelContext.create(Topology(RANK, WORLD))
    problem = UserError(Problem("Data.path", "/nowhere", "must exist")) if RANK == 1 else None
    context.agree(problem)


def bound_port() -> None:
    ParallelContext.create(Topology(RANK, WORLD))


def short_job() -> None:
    with ParallelContext.create(Topology(RANK, WORLD)) as context:
        total = all_reduce_sum_(paddle.to_tensor([float(os.environ["JOB"])]), context.group("dp"))
        assert total.item() == 2 * float(os.environ["JOB"])
    print("job done")


def endless() -> None:
    """Half the ranks work, half wait on the store, until a signal comes."""
    context = ParallelContext.create(Topology(RANK, WORLD))
    print("waiting", flush=True)
    context.rank0_first("endless", lambda: time.sleep(600))


if __name__ == "__main__":
    random.seed(0)
    scenes = {f.__name__: f for f in (all_layouts, user_error, bound_port, short_job, endless)}
    try:
        scenes[sys.argv[1]]()
    except UserError as error:
        print(error, flush=True)
        sys.exit(EXIT_USER_ERROR)
