"""Which seed each random stream of a rank starts from (rule B32 of PaddleFleetX, with sep added). Imports no Paddle."""

from __future__ import annotations

from typing import NamedTuple

from ppfleetx.distributed.topology import Topology


class Seeds(NamedTuple):
    """The seeds of one rank.

    Attributes:
        global_seed: equal over an mp group, different elsewhere: dropout of values that mp replicates.
        local_seed: different on every rank: dropout of values that mp cuts. No local seed equals a global one.
        model_parallel_seed: Fleet's own formula for the stream its mp layers initialise from (our weights do not).
        host_seed: Python's and NumPy's generators.
    """

    global_seed: int
    local_seed: int
    model_parallel_seed: int
    host_seed: int


def rank_seeds(topology: Topology, seed: int) -> Seeds:
    """Seeds of `topology`'s rank for the run's `Global.seed`, an integer of at least 0."""
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed={seed!r} must be an integer of at least 0")
    degree, index = topology.degrees, topology.coordinate
    # One step on an axis is worth the product of the degrees before it, mp first, so that sums never meet.
    offset, step = 0, degree["mp"]
    for axis in ("pp", "dp", "sharding", "sep"):
        offset += index[axis] * step
        step *= degree[axis]
    global_seed = seed + 1024 + topology.world_size + offset
    return Seeds(
        global_seed=global_seed,
        local_seed=global_seed + topology.world_size + index["mp"],
        model_parallel_seed=seed + 1 + index["mp"] * degree["pp"] + index["pp"],
        host_seed=seed + 100 * index["pp"],
    )
