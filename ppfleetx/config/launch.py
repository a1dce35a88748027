"""What `paddle.distributed.launch` tells its processes by environment variables (names of Paddle 3.3.1)."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ppfleetx.config.errors import Problem, UserError

_FIX = "start through `python -m paddle.distributed.launch`, or unset all PADDLE_* variables to run one process"
#: what Paddle needs to meet other processes, beside their number
_MEETING = ("PADDLE_TRAINER_ID", "PADDLE_TRAINER_ENDPOINTS", "PADDLE_CURRENT_ENDPOINT")


def world_size_of_launch(environ: Mapping[str, str] = os.environ) -> int:
    """The number of processes that the launcher started (1 without it).

    Raises:
        UserError: it is no number above 0.
    """
    return _number(environ, "PADDLE_TRAINERS_NUM", 1, at_least=1)


def rank_of_launch(environ: Mapping[str, str] = os.environ) -> int:
    """The global rank of this process (0 without a launcher).

    Raises:
        UserError: it is no number.
    """
    return _number(environ, "PADDLE_TRAINER_ID", 0, at_least=0)


def nodes_of_launch(environ: Mapping[str, str] = os.environ) -> int | None:
    """The number of machines that the launcher started processes on (1 without it); None if not as many on each.

    Raises:
        UserError: PADDLE_NNODES or PADDLE_LOCAL_SIZE is no number above 0.
    """
    nodes, world = _number(environ, "PADDLE_NNODES", 1, at_least=1), world_size_of_launch(environ)
    return nodes if local_size_of_launch(environ) * nodes == world else None


def local_size_of_launch(environ: Mapping[str, str] = os.environ) -> int:
    """The number of processes that the launcher started on this machine (1 without it).

    Raises:
        UserError: PADDLE_NNODES or PADDLE_LOCAL_SIZE is no number above 0.
    """
    nodes, world = _number(environ, "PADDLE_NNODES", 1, at_least=1), world_size_of_launch(environ)
    return _number(environ, "PADDLE_LOCAL_SIZE", max(world // nodes, 1), at_least=1)


def master_address(environ: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Host and port of the job's store, in the order in which Paddle looks.

    Raises:
        UserError: there is none of the form host:port.
    """
    if environ.get("MASTER_ADDR") and environ.get("MASTER_PORT"):
        name, address = "MASTER_ADDR:MASTER_PORT", f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
    elif environ.get("PADDLE_MASTER"):
        name, address = "PADDLE_MASTER", environ["PADDLE_MASTER"]
    else:
        name, address = "PADDLE_TRAINER_ENDPOINTS", environ.get("PADDLE_TRAINER_ENDPOINTS", "").split(",")[0]
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(Problem(name, address, "it must be host:port, a port from 1 to 65535", _FIX))
    return host, int(port)


def check_launch(environ: Mapping[str, str] = os.environ) -> None:
    """Local; before Paddle is imported, which trips over some of these.

    Raises:
        UserError: the variables do not fit together.
    """
    world, rank = world_size_of_launch(environ), rank_of_launch(environ)
    if rank >= world:
        rule = f"ranks of PADDLE_TRAINERS_NUM {world} processes are 0..{world - 1}"
        raise UserError(Problem("PADDLE_TRAINER_ID", rank, rule, _FIX))
    if world == 1:
        return
    if missing := [name for name in _MEETING if not environ.get(name)]:
        rule = f"PADDLE_TRAINERS_NUM is {world}, so it must be set too"
        raise UserError(*(Problem(name, environ.get(name), rule, _FIX) for name in missing))
    endpoints = environ["PADDLE_TRAINER_ENDPOINTS"]
    if len(endpoints.split(",")) != world:
        rule = f"it must name PADDLE_TRAINERS_NUM {world} processes, one host:port each"
        raise UserError(Problem("PADDLE_TRAINER_ENDPOINTS", endpoints, rule, _FIX))
    master_address(environ)


def _number(environ: Mapping[str, str], name: str, default: int, at_least: int) -> int:
    text = environ.get(name)
    if text is None:
        return default
    if not text.isdecimal() or int(text) < at_least:
        raise UserError(Problem(name, text, f"it must be a whole number, at least {at_least}", _FIX))
    return int(text)
