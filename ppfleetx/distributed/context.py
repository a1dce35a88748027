"""The processes of a run, met and grouped: the only caller of fleet.init."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from ppfleetx.config.errors import UserError
from ppfleetx.distributed.agreement import MEETING_TIMEOUT_S, Meetings, Notice
from ppfleetx.distributed.device import check_device, set_device
from ppfleetx.distributed.store import START_TIMEOUT_S, open_job_store
from ppfleetx.distributed.topology import AXES, Topology

if TYPE_CHECKING:
    from paddle.distributed.communication.group import Group

T = TypeVar("T")

#: Fleet's name of each axis
_FLEET_NAMES = {"dp": "data", "pp": "pipe", "sharding": "sharding", "mp": "model", "sep": "sep"}

#: axes whose ranks hold the same model and different data
_DATA_AXES = ("dp", "sharding", "sep")
#: those of them whose ranks hold the same cuts of it, where it is sharded
_REPLICA_AXES = ("dp", "sep")
#: groups over several axes
_FUSED = (_DATA_AXES, _REPLICA_AXES)

_meetings: Meetings | None = None  # the job's store is opened once a process, however many contexts follow


class ParallelContext:
    """This process among the others: its topology, device and groups. Made by `create`.

    With one process there is no distributed stack: no store, no port, no fleet.init, and every group is None.

    Attributes:
        topology: the numbers; its groups are Fleet's, checked at the start.
        device: Paddle's name of this process's device, such as `cpu` or `gpu:3`.
        is_main: this is global rank 0, which prints and writes for all.
    """

    def __init__(self, topology: Topology, device: str, groups: dict[str, Group], meetings: Meetings | None):
        self.topology = topology
        self.device = device
        self.is_main = topology.device_rank == 0
        self._groups = groups
        self._meetings = meetings

    @classmethod
    def create(
        cls,
        topology: Topology,
        device: str = "cpu",
        timeout_s: float = START_TIMEOUT_S,
        settings: Mapping[str, Any] | None = None,
    ) -> ParallelContext:
        """Meet the other processes and set up the groups; every rank calls it with its own topology.

        May be called again in one process with another layout, on all ranks alike.

        Args:
            topology: its rank and world size must be the launcher's.
            device: the kind that `Global.device` names.
            timeout_s: how long to wait for the other processes.
            settings: what must be the same on all ranks, JSON values by name; compared before any group is made.

        Raises:
            UserError: settings differ; a device or Paddle version that cannot be used, or the job's port is taken.
            RuntimeError: a rank did not come in time, or Fleet's groups are not the topology's (our bug).
        """
        check_device(device)
        name = set_device(device)
        if topology.world_size == 1:
            return cls(topology, name, {}, None)
        launched = int(os.environ.get("PADDLE_TRAINER_ID", "0")), int(os.environ.get("PADDLE_TRAINERS_NUM", "1"))
        if launched != (topology.device_rank, topology.world_size):
            raise RuntimeError(f"the launcher says rank {launched[0]} of {launched[1]}, but the topology is {topology}")
        _die_quietly_on_sigterm()
        meetings = _meet(topology, device, timeout_s)
        meetings.same(settings or {})
        hybrid = _init_fleet(topology)
        _compare(topology, hybrid)
        groups = {axis: _fleet_group(hybrid, axis) for axis in AXES if topology.degrees[axis] > 1}
        for axes in _FUSED:
            members = [groups[axis] for axis in axes if axis in groups]
            group = _fused_group(topology, axes) if len(members) > 1 else next(iter(members), None)
            if group is not None:
                groups["×".join(axes)] = group
        if (group := _tied_group(topology)) is not None:
            groups["tied"] = group
        return cls(topology, name, groups, meetings)

    def group(self, axis: str) -> Group | None:
        """This rank's group on `axis` (dp, pp, sharding, mp, sep); None where the group has one member."""
        if axis not in AXES:
            raise ValueError(f"axis {axis!r} must be one of {AXES}")
        return self._groups.get(axis)

    @property
    def data_group(self) -> Group | None:
        """The ranks that hold the same parameters and see other samples or parts of a sequence (dp × sharding × sep): the
        global batch's sums, and gradients, go over it."""
        return self._groups.get("×".join(_DATA_AXES))

    @property
    def replica_group(self) -> Group | None:
        """Those of the data group that hold the same cuts of sharded parameters (dp × sep)."""
        return self._groups.get("×".join(_REPLICA_AXES))

    @property
    def tied_group(self) -> Group | None:
        """The first and the last stage of this rank's pipeline, which hold the tied embedding; None on other stages and
        without a pipeline."""
        return self._groups.get("tied")

    def agree(self, problem: UserError | None, timeout_s: float = MEETING_TIMEOUT_S) -> None:
        """Return on all ranks if none has a problem; else raise the lowest such rank's UserError on all, so that all
        processes end alike. Every rank calls it; goes over the store, so it is a barrier without Gloo's 30 s."""
        if self._meetings is not None:
            self._meetings.agree(problem, timeout_s)
        elif problem is not None:
            raise problem

    def together(self, work: Callable[[], T]) -> T:
        """Do `work` on every rank; a UserError that any of them meets is raised on all, like `agree`'s."""
        problem, results = None, []
        try:
            results.append(work())
        except UserError as error:
            problem = error
        self.agree(problem)
        return results[0]

    def same(self, values: Mapping[str, Any]) -> None:
        """Return on all ranks if all hold the same values (JSON, by name); else raise a UserError that names them, on all.
        Every rank calls it."""
        if self._meetings is not None:
            self._meetings.same(values)

    def rank0_first(self, name: str, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 while the others wait for its end, however long it takes; all get its result (JSON).

        Every rank calls it. Any work of one rank that may take 30 s (an index, a download, a big save) must go
        through here: otherwise the others die in their next collective. If `work` fails, all ranks raise.
        """
        return work() if self._meetings is None else self._meetings.rank0_first(name, work)

    def beside(self, name: str) -> ParallelContext:
        """The same ranks for another thread, whose meetings do not disturb this one's. Every rank calls it."""
        meetings = None if self._meetings is None else self._meetings.beside(name)
        return ParallelContext(self.topology, self.device, self._groups, meetings)

    def notice(self, name: str) -> Notice:
        """A text that any rank may post and all may look for. Every rank calls it."""
        return Notice(None) if self._meetings is None else self._meetings.notice(name)

    def close(self) -> None:
        """Say farewell, at the end of a run that went well; every rank calls it. Rank 0 returns last, so that nobody
        loses the store while still at work. After an error just exit: the launcher ends the others."""
        if self._meetings is not None:
            if self.device == "cpu":
                from ppfleetx.distributed import gloo

                gloo.flush()  # messages that are still under way
            self._meetings.farewell()

    def __enter__(self) -> ParallelContext:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif self._meetings is not None and self.device == "cpu":
            from ppfleetx.distributed import gloo

            gloo.abandon()  # do not wait for peers that may be gone


def _meet(topology: Topology, device: str, timeout_s: float) -> Meetings:
    """Open the job's store, once a process; on CPU, let Paddle set up its groups over it."""
    global _meetings
    if _meetings is None:
        if device == "cpu":
            os.environ["PADDLE_DISTRI_BACKEND"] = "gloo"  # the launcher sets it only where it sees no GPU
        store = open_job_store(topology.device_rank, topology.world_size, device, timeout_s)
        if device == "cpu":
            from ppfleetx.distributed import gloo  # a GPU run never imports it

            gloo.install(store)
        _meetings = Meetings(store)
    return _meetings


def _init_fleet(topology: Topology) -> Any:
    """fleet.init with the topology's degrees and order; gives Fleet's HybridCommunicateGroup.

    Private names: `fleet.fleet._hcg` and `topology._HYBRID_PARALLEL_GROUP`. Fleet keeps the first layout it is given
    and ignores later ones with a warning; forgetting both lets one set of processes run many layouts.
    """
    from paddle.distributed import fleet
    from paddle.distributed.fleet.base import topology as fleet_topology

    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {
        **{f"{axis}_degree": degree for axis, degree in topology.degrees.items()},
        "order": list(topology.order),
        # Fleet would broadcast every input over mp, on a GPU only; our ranks read the same data by themselves.
        "mp_configs": {"need_broadcast_data": False},
        # Without it Fleet 3.3.1 counts the norm of cut parameters once a sep rank (mp × sep; right everywhere with it).
        # It must stand here: assigned to a key of `strategy.hybrid_configs` later, it is lost without a word.
        "split_norm_comm": True,
    }
    fleet.fleet._hcg = None
    fleet_topology._HYBRID_PARALLEL_GROUP = None
    fleet.init(is_collective=True, strategy=strategy, log_level="ERROR")
    return fleet.get_hybrid_communicate_group()


def _compare(topology: Topology, hybrid: Any) -> None:
    """RuntimeError unless Fleet numbers and groups the ranks as the topology does. Fleet does not check the order."""
    fleets = hybrid.topology()
    coordinate = fleets.get_coord(topology.device_rank)
    for axis, fleet_name in _FLEET_NAMES.items():
        ours = (topology.coordinate[axis], topology.groups(axis))
        theirs = (getattr(coordinate, fleet_name), sorted(fleets.get_comm_list(fleet_name)))
        if ours != theirs:
            raise RuntimeError(f"axis {axis}: Topology says (index, groups) {ours}, Fleet says {theirs}; {topology}")
        info = getattr(topology, f"{axis}_info")
        if topology.degrees[axis] > 1 and list(_fleet_group(hybrid, axis).ranks) != info.world:
            raise RuntimeError(f"axis {axis}: Fleet's group is {_fleet_group(hybrid, axis).ranks}; {topology}")


def _fused_group(topology: Topology, axes: tuple[str, ...]) -> Group | None:
    """This rank's group over several axes, None for one member. Paddle wants every rank to make every group."""
    import paddle.distributed as dist

    mine = topology.group_of(*axes)
    groups = [dist.new_group(ranks) for ranks in topology.groups(*axes) if len(ranks) > 1]
    return next((group for group in groups if list(group.ranks) == mine.world), None)


def _tied_group(topology: Topology) -> Group | None:
    """The ends of this rank's pipeline, if it is one of them. Every rank makes every group."""
    import paddle.distributed as dist

    ends = [[ranks[0], ranks[-1]] for ranks in topology.groups("pp") if len(ranks) > 1]
    groups = [dist.new_group(pair) for pair in ends]
    return next((group for group in groups if topology.device_rank in group.ranks), None)


def _fleet_group(hybrid: Any, axis: str) -> Group:
    getters = {
        "dp": "get_data_parallel_group",
        "pp": "get_pipe_parallel_group",
        "sharding": "get_sharding_parallel_group",
        "mp": "get_model_parallel_group",
        "sep": "get_sep_parallel_group",
    }
    return getattr(hybrid, getters[axis])()


def _die_quietly_on_sigterm() -> None:
    """Let SIGTERM, by which the launcher ends the others when one rank fails, end this process without a word.

    Paddle's own handler prints a C++ stack that looks like the cause. A handler set from Python is left alone.
    """
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Paddle set its own below Python's notice
