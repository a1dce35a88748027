"""Topology against an oracle written independently, and against Fleet's own numbering (cases C13; 120 orders)."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppfleetx.distributed.topology import AXES, GroupInfo, Topology

ORDERS = list(itertools.permutations(AXES))
DEGREES = [(2, 2, 2, 2, 2), (1, 2, 3, 1, 2), (2, 1, 3, 2, 1), (1, 1, 1, 1, 1), (3, 1, 1, 2, 2), (1, 4, 1, 2, 1)]
FLEET_NAMES = {"dp": "data", "pp": "pipe", "sharding": "sharding", "mp": "model", "sep": "sep"}


def make(rank, degrees, order=AXES):
    named = {f"{axis}_degree": degree for axis, degree in degrees.items()}
    world = 1
    for degree in degrees.values():
        world *= degree
    return Topology(rank, world, order=order, **named)


def oracle(degrees, order):
    """Coordinate of every rank, as a list of dicts: counting through all coordinates, the last axis fastest."""
    return [
        dict(zip(order, index, strict=True)) for index in itertools.product(*(range(degrees[axis]) for axis in order))
    ]


def check(degrees, order):
    coordinates = oracle(degrees, order)
    world_size = len(coordinates)
    data_ranks = [one["dp"] * degrees["sharding"] + one["sharding"] for one in coordinates]
    for rank, own in enumerate(coordinates):
        topology = make(rank, degrees, order)
        assert topology.coordinate == own
        for axis in AXES:
            world = [
                other
                for other, one in enumerate(coordinates)
                if all(one[name] == own[name] for name in AXES if name != axis)
            ]
            world.sort(key=lambda other: coordinates[other][axis])
            assert getattr(topology, f"{axis}_info") == GroupInfo(degrees[axis], own[axis], world)
            assert topology.group_of(axis).world == world
        assert topology.world == GroupInfo(world_size, rank, list(range(world_size)))
        assert topology.data_info == GroupInfo(degrees["dp"] * degrees["sharding"], data_ranks[rank], data_ranks)
        assert topology.is_last == (own["pp"] == degrees["pp"] - 1)
        assert topology.data_inner_times == degrees["pp"] * degrees["mp"] * degrees["sep"]
    assert sorted(set(data_ranks)) == list(range(degrees["dp"] * degrees["sharding"]))


@pytest.mark.parametrize("sizes", DEGREES)
def test_all_orders_equal_the_oracle(sizes):
    for order in ORDERS:
        check(dict(zip(AXES, sizes, strict=True)), order)


@settings(max_examples=150, deadline=None)
@given(order=st.permutations(AXES), sizes=st.tuples(*[st.integers(1, 4)] * 5).filter(lambda s: _product(s) <= 48))
def test_any_degrees_equal_the_oracle(order, sizes):
    check(dict(zip(AXES, sizes, strict=True)), order)


def _product(sizes):
    result = 1
    for size in sizes:
        result *= size
    return result


@settings(max_examples=100, deadline=None)
@given(
    order=st.permutations(AXES),
    sizes=st.tuples(*[st.integers(1, 3)] * 5),
    fused=st.sets(st.sampled_from(AXES), min_size=1),
)
def test_fused_groups_partition_the_ranks(order, sizes, fused):
    degrees = dict(zip(AXES, sizes, strict=True))
    coordinates = oracle(degrees, order)
    buckets: dict = {}
    for rank, own in enumerate(coordinates):
        buckets.setdefault(tuple(own[axis] for axis in AXES if axis not in fused), []).append(rank)
    topology = make(len(coordinates) - 1, degrees, order)
    assert topology.groups(*fused) == sorted(buckets.values())
    mine = next(group for group in buckets.values() if topology.device_rank in group)
    assert topology.group_of(*fused) == GroupInfo(len(mine), mine.index(topology.device_rank), mine)


@pytest.mark.parametrize("sizes", DEGREES)
def test_all_orders_equal_fleet(sizes):
    fleet_topology = pytest.importorskip("paddle.distributed.fleet.base.topology")
    degrees = dict(zip(AXES, sizes, strict=True))
    for order in ORDERS:
        fleets = fleet_topology.CommunicateTopology(
            [FLEET_NAMES[axis] for axis in order], [degrees[axis] for axis in order]
        )
        topology = make(0, degrees, order)
        for axis in AXES:
            assert topology.groups(axis) == sorted(fleets.get_comm_list(FLEET_NAMES[axis]))
        fused = sorted(map(sorted, fleets.get_fused_ranks(["data", "sep"])))
        assert topology.groups("dp", "sep") == fused
        for rank in range(fleets.world_size()):
            theirs = fleets.get_coord(rank)._asdict()
            assert {FLEET_NAMES[axis]: index for axis, index in topology.coordinate_of(rank).items()} == theirs


def test_inferred_dp_degree_c13():
    assert Topology(0, 8, mp_degree=2, pp_degree=2).degrees["dp"] == 2
    assert Topology(0, 8, mp_degree=2, pp_degree=2, sep_degree=2).degrees["dp"] == 1
    assert Topology(0, 1).dp_info == GroupInfo(1, 0, [0])


@pytest.mark.parametrize(
    "arguments",
    [
        {"mp_degree": 2, "pp_degree": 2, "dp_degree": 4},
        {"mp_degree": 3},
        {"mp_degree": 0},
        {"dp_degree": -1},
        {"pp_degree": 2.0},
        {"sep_degree": True},
        {"sharding_degree": None},
    ],
)
def test_bad_degrees_name_everything_c13(arguments):
    with pytest.raises(ValueError) as caught:
        Topology(0, 8, **arguments)
    for axis in AXES:
        default = None if axis == "dp" else 1
        assert f"{axis}_degree={arguments.get(f'{axis}_degree', default)!r}" in str(caught.value)
    assert "world_size=8" in str(caught.value)


@pytest.mark.parametrize("rank", [-1, 8, 1.0, True, None])
def test_bad_rank(rank):
    with pytest.raises(ValueError, match=r"device_rank=.* world_size=8"):
        Topology(rank, 8)


@pytest.mark.parametrize("world_size", [0, -2, 2.0, True, None])
def test_bad_world_size(world_size):
    with pytest.raises(ValueError, match="world_size"):
        Topology(0, world_size)


@pytest.mark.parametrize(
    "order", [["dp", "pp", "mp"], ["dp", "dp", "sharding", "mp", "sep"], [*AXES, "dp"], "dp", [], ["a", *AXES[1:]]]
)
def test_bad_order(order):
    with pytest.raises(ValueError, match="order="):
        Topology(0, 1, order=order)


def test_order_may_be_a_list_or_a_tuple():
    assert Topology(1, 2, order=list(reversed(AXES))).order == Topology(1, 2, order=tuple(reversed(AXES))).order


def test_repr_is_readable():
    text = repr(Topology(5, 8, mp_degree=2, pp_degree=2))
    assert text.splitlines()[0] == "Topology: rank 5 of 8, order dp > pp > sharding > mp > sep"
    assert "  mp:       rank 1 of 2, ranks [4, 5]" in text.splitlines()
