"""Measures what the project promises, on this machine.

    python tools/bench.py engine     the engine's step beside a bare Paddle loop of the same model
    python tools/bench.py data       opening a corpus of a million documents
    python tools/bench.py checkpoint saving and loading beside plain files, and a late resume
    python tools/bench.py recompute  peak memory of an update by what is recomputed
    python tools/bench.py quickstart --against 94b6fee    its step beside that of another commit, both at their defaults

Threads and kernels are those that a run of the same size has. The last line tells the result beside
its budget; nothing passes or fails here.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script from a clone: find the package beside us
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ppfleetx.bench import LOGGING_FREQ, machine, machine_line
from ppfleetx.config.errors import UserError
from ppfleetx.config.schema import GlobalConfig
from ppfleetx.distributed.cpu import import_paddle
from ppfleetx.engine.command import quiet_paddle, report


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="benchmark", required=True)
    changes = argparse.ArgumentParser(add_help=False)
    changes.add_argument(
        "-o", "--override", action="extend", nargs="+", default=[], metavar="KEY=VALUE", help="another model, say"
    )
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    repeated = argparse.ArgumentParser(add_help=False)
    repeated.add_argument("--rounds", type=_count, default=5, metavar="N", help="repetitions (default: %(default)s)")
    engine = verbs.add_parser("engine", parents=[common, repeated, changes], help="engine against a bare Paddle loop")
    engine.set_defaults(measure=_engine)
    engine.add_argument(
        "--steps", type=_windows, default=20, metavar="N", help="updates of a round, a multiple of 10 (default: 20)"
    )
    data = verbs.add_parser("data", parents=[common, repeated], help="opening a large corpus")
    data.set_defaults(measure=_data)
    data.add_argument("--documents", type=_count, default=1_000_000, metavar="N", help="default: %(default)s")
    data.add_argument("--tokens", type=_count, default=500_000_000, metavar="N", help="default: %(default)s")
    checkpoint = verbs.add_parser("checkpoint", parents=[common, repeated], help="saving and loading")
    checkpoint.set_defaults(measure=_checkpoint)
    checkpoint.add_argument("--megabytes", type=_count, default=500, metavar="N", help="default: %(default)s")
    checkpoint.add_argument(
        "--folder", type=Path, metavar="DIR", help="on the disk to measure (default: a temporary one)"
    )
    recompute = verbs.add_parser("recompute", parents=[common, changes], help="memory by what is recomputed")
    recompute.set_defaults(measure=_recompute)
    quickstart = verbs.add_parser(
        "quickstart", parents=[common, repeated, changes], help="a step beside another commit's"
    )
    quickstart.set_defaults(measure=_quickstart)
    quickstart.add_argument(
        "--against", required=True, metavar="COMMIT", help="commit, or a folder that holds another clone"
    )
    quickstart.add_argument(
        "--steps",
        type=_windows,
        default=60,
        metavar="N",
        help="updates of a round, a multiple of 10 (default: %(default)s)",
    )
    return parser.parse_args(argv)


def _count(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} must be at least 1")
    return number


def _windows(text: str) -> int:
    if (number := _count(text)) % LOGGING_FREQ:
        raise argparse.ArgumentTypeError(f"{number} must be a multiple of {LOGGING_FREQ}, so that rounds log alike")
    return number


def _engine(folder: Path, args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    from ppfleetx.bench.engine import engine_lines, measure_engine

    result = measure_engine(folder, args.rounds, args.steps, args.override)
    return result, engine_lines(result)


def _data(folder: Path, args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    from ppfleetx.bench.data import data_lines, measure_data

    result = measure_data(folder, args.documents, args.tokens, args.rounds)
    return result, data_lines(result)


def _checkpoint(folder: Path, args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    from ppfleetx.bench.checkpoint import checkpoint_lines, measure_checkpoint

    result = measure_checkpoint(folder, args.rounds, args.megabytes)
    return result, checkpoint_lines(result)


def _recompute(folder: Path, args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    from ppfleetx.bench.recompute import measure_recompute, recompute_lines

    result = measure_recompute(args.override)
    return result, recompute_lines(result)


def _quickstart(folder: Path, args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    from ppfleetx.bench.quickstart import measure_quickstart, quickstart_lines

    result = measure_quickstart(folder, args.against, args.rounds, args.steps, args.override)
    return result, quickstart_lines(result)


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    args = parse_args(argv)
    quiet_paddle()
    import_paddle(GlobalConfig(device="cpu"))
    where = getattr(args, "folder", None)
    with tempfile.TemporaryDirectory(prefix="ppfleetx-bench-", dir=where) as folder:
        try:
            result, lines = args.measure(Path(folder), args)
        except UserError as error:
            return report(error)
    here = machine()
    print(machine_line(here), *lines, sep="\n")
    if args.json is not None:
        args.json.write_text(json.dumps({"machine": here, **result}, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
