"""The private names of Paddle that the CPU backend stands on, and the versions it was tested with."""

from __future__ import annotations

from importlib import import_module
from typing import NamedTuple

import paddle

from ppfleetx.config.errors import Problem, UserError

#: versions whose private names were read and tested
SUPPORTED = "3.3."


class PrivateName(NamedTuple):
    """One private name: what it stands for here, and how to know that we no longer need it."""

    module: str
    name: str
    purpose: str
    can_go_when: str


PRIVATE_NAMES = (
    PrivateName(
        "paddle.base.core",
        "create_or_get_global_tcp_store",
        "replaced: gives Paddle the store that is open already; its own blocks without end for a rank that never comes",
        "init_parallel_env takes a store, or its own obeys a timeout",
    ),
    PrivateName(
        "paddle.base.core",
        "ProcessGroupGloo.create",
        "called with a store of the group's own: it writes keys without the group's name, so on a shared store "
        "one group reads the addresses of another and dies with 'connection refused' or after 30 s",
        "4 processes of mp2·pp2 start 50 times out of 50 without gloo/groups.py (group_startup.py counts)",
    ),
    PrivateName(
        "paddle.distributed.collective",
        "_new_process_group_impl",
        "replaced: the place where Paddle calls ProcessGroupGloo.create",
        "the same",
    ),
    PrivateName(
        "paddle.distributed.parallel",
        "_new_process_group_impl",
        "replaced: a copy of the same name, for the group of all ranks",
        "the same",
    ),
    PrivateName(
        "paddle.distributed.collective",
        "new_group",
        "replaced (the public paddle.distributed.new_group too): Fleet asks for the same ranks under several names; "
        "one group serves them all, with fewer sockets and a faster start",
        "Paddle shares groups, or a start is fast without it",
    ),
)


def check() -> None:
    """UserError for an unsupported Paddle version, RuntimeError for a private name that is missing. Local."""
    version = paddle.__version__
    if not version.startswith(SUPPORTED):
        rule = f"several processes on CPU need PaddlePaddle {SUPPORTED}x, this is {version}"
        raise UserError(Problem("Global.device", "cpu", rule, "pip install paddlepaddle==3.3.1"))
    for private in PRIVATE_NAMES:
        found: object = import_module(private.module)
        for part in private.name.split("."):
            found = getattr(found, part, None)
        if found is None:
            raise RuntimeError(f"Paddle {version} lacks {private.module}.{private.name} ({private.purpose})")
