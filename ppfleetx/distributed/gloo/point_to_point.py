"""Messages between two ranks over Gloo: in order, buffered, and in both directions at once.

Stands in for `send` and `recv` of `core.ProcessGroupGloo`, their variants, and `_start_coalescing`/`_end_coalescing`
(private.py says when they can go). Paddle's send waits until the peer receives, and in one group the two directions mix
up their messages. So each *lane*, from one member of a group to another, is a Gloo group of two of its own, made at its
first message over a store of its own, and a thread that works its messages off in order.

A send returns at once. One that fails later is printed at once and raised by the next send, receive or `flush`.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import paddle
import paddle.distributed as dist
from paddle.base import core

from ppfleetx.distributed.gloo import groups
from ppfleetx.distributed.gloo.carriers import carrier, deliver

if TYPE_CHECKING:
    from paddle import Tensor

_Gloo: Any = core.ProcessGroupGloo  # Any: its methods are replaced
_raw_send, _raw_recv = _Gloo.send, _Gloo.recv  # Paddle's, since a module is loaded once

#: how long to wait for the last messages to be received; Gloo gives up after 30 s
FLUSH_TIMEOUT_S = 40.0
#: Paddle numbers its groups from 0; lanes are numbered from here
_FIRST_LANE_ID = 10_000_000


class Done:
    """The task of a call that is over."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.wait()


DONE = Done()


class _Arrival(Done):
    """The task of a receive: `wait` returns when the message is in the tensor."""

    def __init__(self, received: Future[None], write: Callable[[], None]):
        self._received, self._write = received, write
        self._written = False

    def wait(self, timeout: Any = None) -> bool:
        self._received.result()
        if not self._written:
            self._written = True
            self._write()
        return True

    def is_completed(self) -> bool:
        return self._received.done() and self.wait()


def lane_id(group_id: int, source: int, destination: int, world_size: int) -> int:
    """A number that no other lane of the job has, the same at both ends; Paddle refuses one that is taken.

    The digits are to the base of the job's world size, not of the group's: groups of different sizes must not share one.
    """
    return _FIRST_LANE_ID + (group_id * world_size + source) * world_size + destination


class _Lane:
    """One direction between two members of a group, seen from one of them; local member 0 sends, 1 receives."""

    def __init__(self, group_id: int, source: int, destination: int, end: int):
        ranks = dist.get_group(group_id).ranks
        self.name = f"from rank {ranks[source]} to rank {ranks[destination]}"
        self._key, self._end = f"lane/{group_id}/{source}-{destination}", end
        self._id = lane_id(group_id, source, destination, dist.get_world_size())
        self._jobs: SimpleQueue[tuple[Callable[[Any], Any], Future[None]]] = SimpleQueue()
        self.last: Future[None] | None = None
        self.failure: RuntimeError | None = None
        # A daemon: after an error the process must end although a message is still under way.
        threading.Thread(target=self._work, name=self._key, daemon=True).start()

    def submit(self, job: Callable[[Any], Any]) -> Future[None]:
        """Let the thread call `job` with the Gloo group of two, after all earlier ones."""
        self.last = Future()
        self._jobs.put((job, self.last))
        return self.last

    def _work(self) -> None:
        pair = None
        while True:
            job, done = self._jobs.get()
            try:
                if self.failure is None:
                    pair = pair or groups.pair(self._key, self._end, self._id)
                    job(pair).wait()
            except Exception as error:
                self.failure = RuntimeError(f"a message {self.name} was lost: {error}")
                print(f"ppfleetx: {self.failure}", file=sys.stderr, flush=True)
            if self.failure is None:
                done.set_result(None)
            else:
                done.set_exception(self.failure)


_sending: dict[tuple[Any, int], _Lane] = {}
_receiving: dict[tuple[Any, int], _Lane] = {}
_abandoned = False
#: receives of a batch in progress, done when all its sends are under way; None outside a batch
_postponed: list[Callable[[], Any]] | None = None


def install() -> None:
    """Put the functions below on `core.ProcessGroupGloo`. Local; a second call changes nothing."""
    _Gloo.send = _Gloo.send_on_calc_stream = send
    _Gloo.recv = recv
    _Gloo.recv_on_calc_stream = _recv_on_calc_stream
    _Gloo.send_partial = _Gloo.send_partial_on_calc_stream = _send_partial
    _Gloo.recv_partial = _Gloo.recv_partial_on_calc_stream = _recv_partial
    _Gloo._start_coalescing = _start_coalescing
    _Gloo._end_coalescing = _end_coalescing
    atexit.unregister(_end)
    atexit.register(_end)


def send(group: Any, tensor: Tensor, destination: int, sync_op: bool = True) -> Done:
    """Send `tensor` as it is now to member `destination`; returns at once.

    Raises:
        TypeError: a dtype that cannot be carried.
        RuntimeError: an earlier send failed.
    """
    _check_sends()
    if tensor.size:
        with paddle.no_grad():
            one = carrier("send", tensor)
            message = tensor.clone() if one is tensor else one
        _lane(_sending, group, destination).submit(lambda pair: _raw_send(pair, message, 1, True))
    return DONE


def recv(group: Any, tensor: Tensor, source: int, sync_op: bool = True) -> Done:
    """Replace `tensor` by the next message of member `source`; with `sync_op=False` once its task has been waited for.

    Raises:
        TypeError: a dtype that cannot be carried.
        RuntimeError: an earlier send failed, or no message came.
    """
    _check_sends()
    if tensor.size == 0:
        return DONE
    with paddle.no_grad():
        one = carrier("recv", tensor)
    received = _lane(_receiving, group, source).submit(lambda pair: _raw_recv(pair, one, 0, True))
    arrival = _Arrival(received, lambda: deliver(one, tensor))
    if sync_op:
        arrival.wait()
    return arrival


def flush(timeout_s: float = FLUSH_TIMEOUT_S) -> None:
    """Return when every message sent from here has been received. Local, but the receivers must do their part.

    Raises:
        RuntimeError: a send failed, or took longer than `timeout_s`.
    """
    for lane in _sending.values():
        try:
            if lane.last is not None:
                lane.last.result(timeout_s)
        except FutureTimeout as error:
            raise RuntimeError(f"a message {lane.name} was not received within {timeout_s:g} s") from error


def abandon() -> None:
    """Do not wait for messages under way when the process ends: it ends after an error. Local."""
    global _abandoned
    _abandoned = True


def _end() -> None:
    """A process that ends well must not take its last messages with it; after an error nobody waits for them."""
    failed = _abandoned or getattr(sys, "last_value", None) is not None  # of an error that nobody caught
    try:
        if not failed:
            flush()
    except RuntimeError as error:
        print(f"ppfleetx: {error}", file=sys.stderr)
    else:
        if all(lane.last is None or lane.last.done() for lane in (*_sending.values(), *_receiving.values())):
            return
    # An exception raised here would leave the exit code 0, and a thread inside Gloo would abort the process.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _check_sends() -> None:
    for lane in _sending.values():
        if lane.failure is not None:
            raise lane.failure


def _lane(lanes: dict[tuple[Any, int], _Lane], group: Any, peer: int) -> _Lane:
    if (group, peer) not in lanes:
        me, group_id = group.rank(), groups.id_of(group)
        lanes[group, peer] = _Lane(group_id, me, peer, 0) if lanes is _sending else _Lane(group_id, peer, me, 1)
    return lanes[group, peer]


def _start_coalescing(group: Any) -> None:
    """Begin a batch, in which receives wait for all sends: else two ranks that both receive first never end."""
    global _postponed
    _postponed = []


def _end_coalescing(group: Any, tasks: Any = None) -> None:
    global _postponed
    receives, _postponed = _postponed or [], None
    for receive in receives:
        receive()


def _recv_on_calc_stream(group: Any, tensor: Tensor, source: int) -> Done:
    if _postponed is None:
        return recv(group, tensor, source)
    _postponed.append(lambda: recv(group, tensor, source))
    return DONE


def _send_partial(
    group: Any, tensor: Tensor, destination: int, num_parts: int, part: int, sync_op: bool = True
) -> Done:
    """Send one of `num_parts` equal parts of `tensor`, taken flat."""
    return send(group, tensor.detach().reshape([num_parts, -1])[part], destination)


def _recv_partial(group: Any, tensor: Tensor, source: int, num_parts: int, part: int, sync_op: bool = True) -> Done:
    """Receive one of `num_parts` equal parts of `tensor`, taken flat; the rest of it stays."""

    def receive() -> None:
        with paddle.no_grad():
            parts = list(tensor.reshape([num_parts, -1]).unbind(0))
            parts[part] = paddle.empty_like(parts[part])
            recv(group, parts[part], source)
            tensor.copy_(paddle.stack(parts).reshape(tensor.shape), True)

    if _postponed is None:
        receive()
    else:
        _postponed.append(receive)
    return DONE
