"""Rule B32 (case C37)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppfleetx.distributed.seeds import rank_seeds
from ppfleetx.distributed.topology import AXES, Topology


def pair(rank, world, **degrees):
    own = rank_seeds(Topology(rank, world, **degrees), 1024)
    return own.global_seed, own.local_seed


def test_values_c37():
    assert pair(0, 1) == (2049, 2050)
    assert [pair(rank, 2, mp_degree=2) for rank in (0, 1)] == [(2050, 2052), (2050, 2053)]
    assert [pair(rank, 2) for rank in (0, 1)] == [(2050, 2052), (2051, 2053)]
    assert pair(7, 8, dp_degree=2, mp_degree=2, pp_degree=2) == (2062, 2071)


def test_host_seed_is_per_stage():
    hosts = [rank_seeds(Topology(rank, 4, pp_degree=2), 1024).host_seed for rank in range(4)]
    assert hosts == [1024, 1124, 1024, 1124]


@settings(max_examples=150, deadline=None)
@given(order=st.permutations(AXES), sizes=st.tuples(*[st.integers(1, 3)] * 5), seed=st.integers(0, 10**9))
def test_no_stream_is_shared_by_accident_c37(order, sizes, seed):
    degrees = {f"{axis}_degree": size for axis, size in zip(AXES, sizes, strict=True)}
    world = 1
    for size in sizes:
        world *= size
    topologies = [Topology(rank, world, order=order, **degrees) for rank in range(world)]
    own = [rank_seeds(topology, seed) for topology in topologies]
    locals_ = {one.local_seed for one in own}
    globals_ = {one.global_seed for one in own}
    assert len(locals_) == world
    assert len(globals_) == world // topologies[0].degrees["mp"]
    assert not locals_ & globals_
    for topology, one in zip(topologies, own, strict=True):
        assert {own[rank].global_seed for rank in topology.mp_info.world} == {one.global_seed}
        # the tracker takes a seed once, so the three streams of one rank must differ
        assert len({one.global_seed, one.local_seed, one.model_parallel_seed}) == 3


@pytest.mark.parametrize("seed", [-1, 1.5, "1", None, True])
def test_bad_seed(seed):
    with pytest.raises(ValueError, match="seed="):
        rank_seeds(Topology(0, 1), seed)
