"""Where a rank stands: five parallel axes laid over the global ranks. Numbers only; imports no Paddle.

Ranks are numbered in row-major order over `order`: the last axis named varies fastest. An *axis* is one of
dp, pp, sharding, mp, sep; a rank's *coordinate* has one index per axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

AXES = ("dp", "pp", "sharding", "mp", "sep")


class GroupInfo(NamedTuple):
    """One group as a member sees it: `world` lists the members' global ranks, and `world[rank]` is the member itself.

    `Topology.data_info` differs: its `world` has one entry a global rank, see there.
    """

    size: int
    rank: int
    world: list[int]


class Topology:
    """The coordinates and groups of one rank.

    Args:
        device_rank: this process's global rank, 0 … world_size - 1.
        world_size: number of processes of the job.
        dp_degree: number of data-parallel replicas; None means whatever the other degrees leave over.
        pp_degree: number of pipeline stages.
        sharding_degree: number of ranks that share one replica's optimizer states (and more, by stage).
        mp_degree: number of tensor-parallel ranks.
        sep_degree: number of ranks that share one sequence.
        order: the five axes from the slowest to the fastest varying one; a list or a tuple.

    Attributes:
        dp_info, pp_info, sharding_info, mp_info, sep_info: this rank's group on each axis, a GroupInfo.
        world: the GroupInfo of all ranks.
        data_info: who reads which data. `rank` = dp rank · sharding_degree + sharding rank, `size` =
            dp_degree · sharding_degree, and `world` has one entry a rank: entry r is global rank r's data rank.
        is_last: this rank holds the last pipeline stage.
        data_inner_times: number of ranks that read the same data.
        degrees: axis to degree; coordinate: axis to this rank's index.

    Raises:
        ValueError: a bad order, degree or rank; the message names all degrees and the world size.
    """

    def __init__(
        self,
        device_rank: int,
        world_size: int,
        dp_degree: int | None = None,
        pp_degree: int = 1,
        sharding_degree: int = 1,
        mp_degree: int = 1,
        sep_degree: int = 1,
        order: Sequence[str] = AXES,
    ):
        given = dict(zip(AXES, (dp_degree, pp_degree, sharding_degree, mp_degree, sep_degree), strict=True))
        self.degrees = _checked_degrees(given, world_size)
        self.order = _checked_order(order)
        if not _is_int(device_rank) or not 0 <= device_rank < world_size:
            named = _named(given, world_size)
            raise ValueError(f"device_rank={device_rank!r} must be from 0 to {world_size - 1} ({named})")
        self.device_rank = device_rank
        self.world_size = world_size
        self._strides = _strides(self.order, self.degrees)
        self.coordinate = self.coordinate_of(device_rank)

        self.dp_info = self._info("dp")
        self.pp_info = self._info("pp")
        self.sharding_info = self._info("sharding")
        self.mp_info = self._info("mp")
        self.sep_info = self._info("sep")
        self.world = GroupInfo(world_size, device_rank, list(range(world_size)))
        self.data_info = GroupInfo(
            self.degrees["dp"] * self.degrees["sharding"],
            self.data_rank_of(device_rank),
            [self.data_rank_of(rank) for rank in range(world_size)],
        )
        self.is_last = self.pp_info.rank == self.pp_info.size - 1
        self.data_inner_times = world_size // self.data_info.size

    def index_of(self, rank: int, axis: str) -> int:
        """Index of global rank `rank` on `axis`."""
        return rank // self._strides[axis] % self.degrees[axis]

    def coordinate_of(self, rank: int) -> dict[str, int]:
        """Axis to index, for global rank `rank`; the axes come in `order`."""
        return {axis: self.index_of(rank, axis) for axis in self.order}

    def data_rank_of(self, rank: int) -> int:
        """Data rank of global rank `rank`: ranks with the same data rank read the same samples."""
        return self.index_of(rank, "dp") * self.degrees["sharding"] + self.index_of(rank, "sharding")

    def groups(self, *axes: str) -> list[list[int]]:
        """All groups of the ranks that differ on `axes` only, e.g. `groups("mp")` or `groups("dp", "sep")`.

        Each group's global ranks ascend (on one axis that is the order of the index); groups come by their first rank.
        """
        members: dict[int, list[int]] = {}
        for rank in range(self.world_size):
            members.setdefault(self._first_of_group(rank, axes), []).append(rank)
        return list(members.values())

    def group_of(self, *axes: str) -> GroupInfo:
        """This rank's group among `groups(*axes)`."""
        first = self._first_of_group(self.device_rank, axes)
        world = [rank for rank in range(self.world_size) if self._first_of_group(rank, axes) == first]
        return GroupInfo(len(world), world.index(self.device_rank), world)

    def _first_of_group(self, rank: int, axes: Sequence[str]) -> int:
        return rank - sum(self.index_of(rank, axis) * self._strides[axis] for axis in axes)

    def _info(self, axis: str) -> GroupInfo:
        first, stride, size = self._first_of_group(self.device_rank, (axis,)), self._strides[axis], self.degrees[axis]
        return GroupInfo(size, self.coordinate[axis], [first + i * stride for i in range(size)])

    def __repr__(self) -> str:
        lines = [f"Topology: rank {self.device_rank} of {self.world_size}, order {' > '.join(self.order)}"]
        for axis in self.order:
            info: GroupInfo = getattr(self, f"{axis}_info")
            lines.append(f"  {axis + ':':<10}rank {info.rank} of {info.size}, ranks {info.world}")
        lines.append(f"  {'data:':<10}rank {self.data_info.rank} of {self.data_info.size}")
        return "\n".join(lines)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _named(degrees: dict[str, int | None], world_size: int) -> str:
    return ", ".join(f"{axis}_degree={degree!r}" for axis, degree in degrees.items()) + f", world_size={world_size!r}"


def _checked_degrees(given: dict[str, int | None], world_size: int) -> dict[str, int]:
    """Degrees with dp filled in, or a ValueError."""
    named = _named(given, world_size)
    if not _is_int(world_size) or world_size < 1:
        raise ValueError(f"world_size must be an integer of at least 1 ({named})")
    known = {axis: degree for axis, degree in given.items() if not (axis == "dp" and degree is None)}
    for axis, degree in known.items():
        if degree is None or not _is_int(degree) or degree < 1:
            raise ValueError(f"{axis}_degree must be an integer of at least 1 ({named})")
    degrees = {axis: int(degree) for axis, degree in known.items() if degree is not None}
    if "dp" not in degrees:
        rest = prod(degrees.values())
        if world_size % rest:
            raise ValueError(f"the product {rest} of the other degrees must divide the world size ({named})")
        degrees = {"dp": world_size // rest, **degrees}
    if prod(degrees.values()) != world_size:
        raise ValueError(f"the product {prod(degrees.values())} of the degrees must be the world size ({named})")
    return degrees


def _checked_order(order: Sequence[str]) -> tuple[str, ...]:
    axes = tuple(order)
    if isinstance(order, str) or len(axes) != len(AXES) or set(axes) != set(AXES):
        raise ValueError(f"order={order!r} must name each of {list(AXES)} once")
    return axes


def _strides(order: Sequence[str], degrees: dict[str, int]) -> dict[str, int]:
    """Axis to the distance in global rank between neighbours on it."""
    strides = {}
    stride = 1
    for axis in reversed(order):
        strides[axis] = stride
        stride *= degrees[axis]
    return strides
