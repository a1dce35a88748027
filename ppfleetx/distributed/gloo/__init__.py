"""Fleet on CPU: what Paddle lacks there, put in from outside. Imported only when `Global.device` is cpu.

`install` is the one entry. Every private name of Paddle that this folder replaces or calls is listed in `private.py`.
"""

from __future__ import annotations

from ppfleetx.distributed.gloo import groups, private
from ppfleetx.distributed.store import JobStore

__all__ = ["install"]


def install(store: JobStore) -> None:
    """Make Paddle set up its CPU groups our way, over `store`; before fleet.init, on every rank. A second call is free.

    Raises:
        UserError: this Paddle version is not supported on several CPU processes.
        RuntimeError: a private name is missing from this Paddle.
    """
    private.check()
    groups.install(store)
