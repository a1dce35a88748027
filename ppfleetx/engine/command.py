"""The command line that every tool of a run shares: `-c`, `-o`, `--dry-run`, `--world-size`, `--explain`.

Looking at a configuration imports no Paddle.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable

from ppfleetx.config import (
    EXIT_USER_ERROR,
    Config,
    Loaded,
    Problem,
    UserError,
    check_launch,
    load_config,
    nodes_of_launch,
    rank_of_launch,
    world_size_of_launch,
)
from ppfleetx.config.explain import explain
from ppfleetx.distributed import Topology
from ppfleetx.distributed.cpu import import_paddle
from ppfleetx.distributed.version import check_paddle_version

#: how long a rank other than 0 waits for rank 0 to report a mistake that both see
_REPORT_GRACE_S = 20.0


def parser(description: str) -> argparse.ArgumentParser:
    """The shared options."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument(
        "-c", "--config", action="append", required=True, metavar="FILE", help="YAML file; a further one is laid over"
    )
    options.add_argument(
        "-o",
        "--override",
        action="extend",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="set Section.key, after all files",
    )
    options.add_argument("--dry-run", action="store_true", help="print the resolved YAML and stop (needs no Paddle)")
    options.add_argument("--world-size", type=int, metavar="N", help="with --dry-run or --explain: number of processes")
    options.add_argument("--nodes", type=int, metavar="N", help="with --world-size: number of nodes (default 1)")
    options.add_argument("--explain", metavar="KEY", help="say where a value comes from and stop")
    return options


def run(arguments: argparse.Namespace, summary: Callable[[Config], str], work: Callable[[Config], int]) -> int:
    """Loads the configuration and does `work` with it, or only shows it; returns the exit code.

    Args:
        summary: one line about a configuration, for --dry-run.
        work: the run; gives its exit code. Its failures are recorded and explained (`ppfleetx.engine.failures`).
    """
    try:
        loaded = _load(arguments)
        if arguments.explain is not None:
            print(explain(loaded, arguments.explain))
            return 0
        if not arguments.dry_run:
            check_launch()
    except UserError as error:
        return report(error)
    if arguments.dry_run:
        print(loaded.config.to_yaml(), end="")
        for line in (*(f"warning: {warning}" for warning in loaded.warnings), summary(loaded.config)):
            print(line, file=sys.stderr)
        return 0
    quiet_paddle()
    try:
        import_paddle(loaded.config.Global)
        check_paddle_version()
    except UserError as error:
        return report(error)
    from ppfleetx.engine.failures import guarded  # needs Paddle

    return guarded(loaded, work)


def _load(arguments: argparse.Namespace) -> Loaded:
    launched = world_size_of_launch()
    world_size = launched if arguments.world_size is None else arguments.world_size
    if world_size < 1:
        raise UserError(Problem("--world-size", world_size, "a run has at least 1 process"))
    if world_size != launched and not (arguments.dry_run or arguments.explain is not None):
        raise UserError(
            Problem(
                "--world-size",
                world_size,
                f"this run has {launched} process{'es' if launched > 1 else ''}",
                "use it with --dry-run or --explain only",
            )
        )
    if (nodes := arguments.nodes) is None:
        nodes = nodes_of_launch() if arguments.world_size is None else 1
    elif arguments.world_size is None or nodes < 1 or world_size % nodes:
        rule = "it spreads the processes of --world-size over so many nodes, as many on each"
        raise UserError(Problem("--nodes", nodes, rule, "use it with --world-size, which must be a multiple of it"))
    return load_config(arguments.config, arguments.override, world_size, nodes)


def quiet_paddle() -> None:
    """Called before Paddle is imported, which tells of its inner life and warns that it finds no compiler cache."""
    os.environ.setdefault("GLOG_minloglevel", "2")
    warnings.filterwarnings("ignore", message="No ccache found")


def topology_of(config: Config) -> Topology:
    """This process's place in the layout of the section `Distributed`."""
    layout = config.Distributed
    return Topology(
        rank_of_launch(),
        config.derived.world_size,
        dp_degree=config.derived.dp_degree,
        pp_degree=layout.pp_degree,
        sharding_degree=layout.sharding.sharding_degree,
        mp_degree=layout.mp_degree,
        sep_degree=layout.sep_degree,
        order=layout.order,
    )


def report(error: UserError) -> int:
    """Prints a user's mistake to standard error and gives the exit code.

    All ranks see the same mistake as a rule, and rank 0 prints it. The launcher ends the others, and loses what they have
    not said, as soon as one process exits: so the others wait for that, and speak only if nothing happens.
    """
    if os.environ.get("PADDLE_TRAINER_ID", "0") != "0":  # the mistake may be that it is no number
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Paddle's own handler prints a C++ stack
        time.sleep(_REPORT_GRACE_S)
    count = len(error.problems)
    print(f"error: {count} problem{'s' if count > 1 else ''} in what this run was given", file=sys.stderr)
    print(error, file=sys.stderr, flush=True)
    return EXIT_USER_ERROR
