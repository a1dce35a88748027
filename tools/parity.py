"""Shows that layouts change nothing: `python tools/parity.py -c configs/debug/tiny_gpt.yaml --layouts dp2 mp2 pp2 mp2pp2`.

Runs each layout and one process for some updates, without dropout, and compares losses, gradient norms and the first
gradient of every parameter. Exit code 1 if any layout parts beyond rounding.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

if __package__ in (None, ""):  # run as a script from a clone: find the package beside us
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ppfleetx.config import Problem, UserError, load_config
from ppfleetx.config.layouts import Layout, parse_layout
from ppfleetx.engine import command


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("-c", "--config", action="append", required=True, metavar="FILE")
    options.add_argument("-o", "--override", action="extend", nargs="+", default=[], metavar="KEY=VALUE")
    options.add_argument(
        "--layouts", nargs="+", required=True, metavar="LAYOUT", help="mp2pp2, sharding2s3, mp2sp, pp4vpp2, …rc"
    )
    options.add_argument("--steps", type=int, default=5, metavar="N", help="updates to compare (default: %(default)s)")
    options.add_argument("--json", type=Path, metavar="FILE", help="write the verdicts there too")
    arguments = options.parse_args(argv)
    try:
        _check(arguments.steps, arguments.json)
        layouts = [parse_layout(text) for text in arguments.layouts]
        for layout in layouts:  # all mistakes before the first run
            load_config(arguments.config, [*arguments.override, *layout.overrides], layout.world_size)
        alone = load_config(arguments.config, arguments.override).config
    except UserError as error:
        return command.report(error)
    return _compare(arguments, layouts, alone.Optimizer.name)


def _check(steps: int, json: Path | None) -> None:
    """UserError for what would else show after the runs."""
    if steps < 1:
        raise UserError(Problem("--steps", steps, "it must be at least 1"))
    if json is not None and (json.is_dir() or not os.access(json if json.exists() else json.parent, os.W_OK)):
        raise UserError(Problem("--json", str(json), "no file can be written there"))


def _compare(arguments: argparse.Namespace, layouts: list[Layout], optimizer: str) -> int:
    command.quiet_paddle()
    from ppfleetx.engine import parity
    from ppfleetx.engine.failures import EXIT_FAILURE, RunError

    files = [word for file in arguments.config for word in ("-c", file)]
    overrides = ["-o", *arguments.override] if arguments.override else []
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="ppfleetx-parity-") as folder:
        runner = parity.Runner(Path(__file__).with_name("train.py"), (*files, *overrides), Path(folder))
        try:
            reference = runner.both(Layout("one", 1, ()), arguments.steps)
            for layout in layouts:
                print(f"running {layout.name} on {layout.world_size} processes", file=sys.stderr)
                found = runner.both(layout, arguments.steps)
                tolerance = parity.LATER.get(optimizer, parity.LATER_ADAM)
                verdicts.append(parity.compare(layout.name, reference, found, tolerance))
        except RunError as error:
            print(
                f"error: {error}\n{Path(str(error).rpartition(' ')[2]).read_text(errors='replace')[-3000:]}",
                file=sys.stderr,
            )
            return EXIT_FAILURE
    print(parity.table(verdicts))
    if arguments.json:
        parity.write_json(verdicts, arguments.json)
    return 0 if all(verdict.passed for verdict in verdicts) else EXIT_FAILURE


if __name__ == "__main__":
    raise SystemExit(main())
