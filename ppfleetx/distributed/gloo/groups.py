"""How CPU groups are set up: each on a store of its own, and one group for one set of ranks.

Stands in for `core.create_or_get_global_tcp_store`, `collective.new_group` and `_new_process_group_impl` in two modules;
calls `core.ProcessGroupGloo.create` (private.py says why, and when they can go).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import paddle.distributed as dist
from paddle.base import core
from paddle.distributed import collective, parallel

from ppfleetx.config.launch import master_address
from ppfleetx.distributed.store import START_TIMEOUT_S, JobStore, serve_store, tcp_store

_original_new_group = collective.new_group
_original_process_group = collective._new_process_group_impl


@dataclass
class _Setup:
    """What `install` was given, and what has been made since. One a process, like Paddle's own groups."""

    store: JobStore | None = None
    groups: dict[tuple[int, ...], Any] = field(default_factory=dict)
    #: Paddle's number of each Gloo group
    ids: dict[Any, int] = field(default_factory=dict)
    #: the groups' stores: a member may still be reading when another is through, so they live as long as the process
    substores: list[Any] = field(default_factory=list)
    #: the job's store over a connection of the threads' own, made under `lock`
    thread_store: JobStore | None = None
    lock: Any = field(default_factory=threading.Lock)


_setup = _Setup()


def install(store: JobStore) -> None:
    """Route Paddle's group creation through this module. Local; a second call only replaces the store."""
    _setup.store = store
    core.create_or_get_global_tcp_store = _transport
    collective._new_process_group_impl = parallel._new_process_group_impl = _process_group
    collective.new_group = dist.new_group = _new_group


def _transport() -> Any:
    """`create_or_get_global_tcp_store` that gives the store that is open already."""
    assert _setup.store is not None
    return _setup.store.transport


def _new_group(ranks: Sequence[int] | None = None, *args: Any, **options: Any) -> Any:
    """`paddle.distributed.new_group` that gives the same Group for the same ranks. As there, every rank of the job
    calls it, members or not, in the same order."""
    key = tuple(range(dist.get_world_size()) if ranks is None else sorted(ranks))
    if len(key) == dist.get_world_size():
        return dist.get_group(0)
    if key not in _setup.groups:
        _setup.groups[key] = _original_new_group(list(key), *args, **options)
    return _setup.groups[key]


def _process_group(
    backend: str, store: Any, rank: int, world_size: int, group_name: str, *args: Any, group_id: int = 0, **options: Any
) -> Any:
    """`_new_process_group_impl` that gives every Gloo group a store of its own. The members call it.

    Group ids agree over the job, since Paddle counts the calls of new_group, so they can name the stores.
    """
    if backend != "gloo" or _setup.store is None:
        return _original_process_group(
            backend, store, rank, world_size, group_name, *args, group_id=group_id, **options
        )
    substore = _substore(_setup.store, f"group/{group_id}", rank)
    _setup.substores.append(substore)
    group = core.ProcessGroupGloo.create(substore, rank, world_size, group_id)
    _setup.ids[group] = group_id
    return group


def id_of(group: Any) -> int:
    """Paddle's number of the Gloo group, the same on all its members."""
    return _setup.ids[group]


def pair(key: str, rank: int, group_id: int) -> Any:
    """A Gloo group of two, on a store of its own under `key`. Any thread may call it; waits for the other member.

    Raises:
        RuntimeError: the other one did not come within START_TIMEOUT_S.
    """
    store = _thread_store()
    substore = _substore(store, key, rank)
    _setup.substores.append(substore)
    store.count(f"{key}/here")  # Gloo would wait for 30 s only
    store.wait_for_count(f"{key}/here", 2, START_TIMEOUT_S, f"both ends of {key}")
    return core.ProcessGroupGloo.create(substore, rank, 2, group_id)


class _LockedTransport:
    """A connection to the job's store for all threads but the main one, whose connection is not to be shared."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._client = tcp_store(*master_address(), is_master=False)

    def set(self, key: str, text: str) -> None:
        with self._lock:
            self._client.set(key, text)

    def get(self, key: str) -> Any:
        with self._lock:
            return self._client.get(key)

    def add(self, key: str, increment: int) -> int:
        with self._lock:
            return int(self._client.add(key, increment))


def _thread_store() -> JobStore:
    """The job's store, over the threads' connection."""
    assert _setup.store is not None
    with _setup.lock:
        if _setup.thread_store is None:
            _setup.thread_store = JobStore(_LockedTransport(), _setup.store.rank, _setup.store.world_size)
    return _setup.thread_store


def _substore(store: JobStore, key: str, rank: int) -> Any:
    """The group's store: served by its rank 0, which publishes the address only once it listens."""
    if rank == 0:
        host = os.environ.get("PADDLE_CURRENT_ENDPOINT", "").rpartition(":")[0] or master_address()[0]
        substore, port = serve_store(host)
        store.put(key, f"{host}:{port}")
        return substore
    address = store.take(key, START_TIMEOUT_S, f"the address of {key}")
    host, _, text = address.rpartition(":")
    return tcp_store(host, int(text), is_master=False)
