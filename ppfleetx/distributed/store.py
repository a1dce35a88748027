"""The store of the job: a few small texts and counters that all ranks see, served by rank 0.

It carries what must not depend on a collective: rank 0's long work (Gloo gives up after 30 s), errors that one rank
sees, the addresses of groups, the farewell. Paddle's TCPStore is the transport; four of its habits (seen in 3.3.1)
shape this file:

- `wait` and `get` of a missing key never return, whatever the store's timeout: keys are polled here, with a deadline;
- each request is two small writes, 44 ms with Nagle's algorithm: TCP_NODELAY is set on every socket of the store;
- a client that connects before the server listens sleeps 3 s and more: a plain socket tries first;
- with its libuv server a port in use aborts the process: the older server, which raises, is chosen by a flag.

Private names: `paddle.base.core.TCPStore`, and `core.create_or_get_global_tcp_store` (on devices other than CPU), the
store that Paddle's own start-up uses. They can go when paddle.distributed exports a store.
"""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import paddle
from paddle.base import core

from ppfleetx.config.errors import Problem, UserError
from ppfleetx.config.launch import master_address

#: how long a process waits for the others to start
START_TIMEOUT_S = 300.0
#: how long rank 0 tries for its port, which a short-lived connection may hold by chance
BIND_TIMEOUT_S = 3.0
#: how long a process that lost rank 0 stays quiet; the launcher ends it within that time
QUIET_END_S = 10.0

_POLL_S = (0.0005, 0.02)


class JobStore:
    """Texts and counters by key, with deadlines. Keys are private to the job, even if two jobs meet on one port."""

    def __init__(self, transport: Any, rank: int, world_size: int):
        self.transport = transport
        self.rank = rank
        self.world_size = world_size
        # The ports the launcher chose tell one job from another.
        job = os.environ.get("PADDLE_TRAINER_ENDPOINTS", "")
        self._prefix = f"ppfleetx/{hashlib.sha256(job.encode()).hexdigest()[:12]}/"

    def another(self) -> JobStore:
        """The same store over a connection of its own: one connection serves one thread."""
        host, port = master_address()
        return JobStore(tcp_store(host, port, is_master=False), self.rank, self.world_size)

    def put(self, key: str, text: str) -> None:
        """Publish `text` under `key`."""
        self._ask(self.transport.set, key, text)
        self.count(f"{key}/there")  # a separate counter, because only a counter can be asked without blocking

    def take(self, key: str, timeout_s: float | None, what: str) -> str:
        """The text under `key`, as soon as some rank has put it; RuntimeError naming `what` after `timeout_s`."""
        self.wait_for_count(f"{key}/there", 1, timeout_s, what)
        text: bytes = self._ask(self.transport.get, key)
        return text.decode()

    def count(self, key: str, increment: int = 1) -> int:
        """Add to the counter under `key`, which starts at 0; gives its new value. `increment=0` only looks."""
        return int(self._ask(self.transport.add, key, increment))

    def wait_for_count(self, key: str, value: int, timeout_s: float | None, what: str) -> None:
        """Return once the counter is at least `value`; RuntimeError naming `what` after `timeout_s` (None: never)."""
        if not poll(lambda: self.count(key, 0) >= value, timeout_s):
            reached = self.count(key, 0)
            raise RuntimeError(f"rank {self.rank} waited {timeout_s:g} s for {what} ({reached} of {value} came)")

    def _ask(self, request: Callable[..., Any], key: str, *values: Any) -> Any:
        """One request; RuntimeError where rank 0 has ended and its store with it.

        Then the launcher is ending this process too, one rank after the other: an error of ours, printed at once, would
        only hide the cause, so it comes late.
        """
        try:
            return request(self._prefix + key, *values)
        except ValueError as error:
            time.sleep(QUIET_END_S)
            raise RuntimeError("rank 0, which serves the job's store, has ended; its log says why") from error


def poll(done: Callable[[], bool], timeout_s: float | None) -> bool:
    """Ask `done` ever more slowly until it says yes (True) or the time is up (False); None is no limit."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    pause, longest = _POLL_S
    while not done():
        if deadline is not None and time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(pause * 1.5, longest)
    return True


def open_job_store(rank: int, world_size: int, device: str, timeout_s: float = START_TIMEOUT_S) -> JobStore:
    """Meet the other ranks at rank 0's store. Every rank calls it.

    On CPU the store is our own, made with `world_size=0`: Paddle's waits without end for ranks that never come.

    Raises:
        UserError: the port is taken (rank 0).
        RuntimeError: some rank did not come within `timeout_s`.
    """
    host, port = master_address()
    paddle.set_flags({"FLAGS_tcp_store_using_libuv": False})
    if rank != 0:
        wait_for_listener(host, port, timeout_s)
    if device == "cpu":
        transport = _listening(port, lambda: tcp_store(host, port, is_master=rank == 0))
    else:
        transport = _listening(port, core.create_or_get_global_tcp_store)
        set_nodelay(port)
    store = JobStore(transport, rank, world_size)
    store.count("arrived")
    store.wait_for_count("arrived", world_size, timeout_s, f"all {world_size} processes to reach {host}:{port}")
    return store


def tcp_store(host: str, port: int, *, is_master: bool) -> Any:
    """A Paddle TCPStore that answers at once: it waits for nobody, and its sockets do not delay small writes."""
    # The last two: wait for 0 workers; a timeout in seconds, which only the first of them would use.
    transport = core.TCPStore(host, port, is_master, 0, int(START_TIMEOUT_S))
    set_nodelay(port)
    return transport


def serve_store(host: str) -> tuple[Any, int]:
    """A further store on a free port of this machine, already listening; with its port."""
    for _ in range(20):
        port = free_port()
        try:
            return tcp_store(host, port, is_master=True), port
        except ValueError:
            continue  # another process took the port in between
    raise RuntimeError("found no free port for a group's store in 20 tries")


def free_port() -> int:
    """A TCP port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def wait_for_listener(host: str, port: int, timeout_s: float) -> None:
    """Return once something listens at host:port; RuntimeError after `timeout_s`."""

    def listens() -> bool:
        try:
            socket.create_connection((host, port), timeout=1).close()
        except OSError:
            return False
        return True

    if not poll(listens, timeout_s):
        raise RuntimeError(f"rank 0's store at {host}:{port} did not answer within {timeout_s:g} s")


def set_nodelay(port: int) -> None:
    """Set TCP_NODELAY on this process's sockets at either end of `port`: client, listener (accepted ones inherit it).

    Paddle hands out no socket, so they are found among the open files (Linux; elsewhere this does nothing).
    """
    if not os.path.isdir("/proc/self/fd"):
        return
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            one = socket.socket(fileno=fd)
        except OSError:
            continue  # not a socket, or gone
        try:
            if one.type == socket.SOCK_STREAM and one.family in (socket.AF_INET, socket.AF_INET6) and _is_at(one, port):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            pass  # closed meanwhile
        finally:
            one.detach()  # the file stays Paddle's


def _is_at(one: socket.socket, port: int) -> bool:
    if one.getsockname()[1] == port:
        return True
    try:
        return bool(one.getpeername()[1] == port)
    except OSError:
        return False  # a listener has no peer


def _listening(port: int, create: Callable[[], Any]) -> Any:
    """`create()`, tried again while its port is taken; UserError naming the port if it stays so."""
    result: list[Any] = []
    failure = ""

    def attempt() -> bool:
        nonlocal failure
        try:
            result.append(create())
        except ValueError as error:
            failure = str(error)
            return False
        return True

    if poll(attempt, BIND_TIMEOUT_S):
        return result[0]
    if "Bind" not in failure:
        raise RuntimeError(f"the job's store at port {port} could not be opened: {failure}")
    rule = f"rank 0 serves the job's store on port {port}, which another process holds"
    fix = "start again (the launcher picks another port), or free the port that --master or MASTER_PORT names"
    raise UserError(Problem("PADDLE_MASTER", "{}:{}".format(*master_address()), rule, fix))
