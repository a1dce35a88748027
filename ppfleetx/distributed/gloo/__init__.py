"""Fleet on CPU: what Paddle lacks there, put in from outside. Imported only when `Global.device` is cpu.

`install` is the one entry. Every private name of Paddle that this folder replaces or calls is listed in `private.py`.
"""

from __future__ import annotations

from ppfleetx.distributed.gloo import private
from ppfleetx.distributed.store import JobStore

__all__ = ["abandon", "flush", "install"]


def install(store: JobStore) -> None:
    """Make Paddle set up its CPU groups our way, over `store`, and give them all that Fleet asks of a group.

    Before fleet.init, on every rank. A second call only replaces the store.

    Raises:
        UserError: this Paddle version is not supported on several CPU processes.
        RuntimeError: a private name is missing from this Paddle.
    """
    private.check()
    # Not before the check, since they take hold of the private names when they load.
    from ppfleetx.distributed.gloo import collectives, fleet_parts, groups, point_to_point, tensor_parallel

    groups.install(store)
    collectives.install()
    point_to_point.install()
    tensor_parallel.install()
    fleet_parts.install()


def flush() -> None:
    """Return when every message sent from here has been received: at the end of a run that went well.

    Raises:
        RuntimeError: a message was lost, or not received in time.
    """
    from ppfleetx.distributed.gloo import point_to_point

    point_to_point.flush()


def abandon() -> None:
    """Let this process end at once, with messages under way: after an error. Local."""
    from ppfleetx.distributed.gloo import point_to_point

    point_to_point.abandon()
