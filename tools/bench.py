"""Measures what the project promises, on this machine.

    python tools/bench.py engine     the engine's step beside a bare Paddle loop of the same model
    python tools/bench.py data       opening a corpus of a million documents

Thread counts follow OMP_NUM_THREADS. The last line tells the result beside its budget; nothing passes or fails here.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

if __package__ in (None, ""):  # run as a script from a clone: find the package beside us
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ppfleetx.config.errors import UserError


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="benchmark", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--rounds", type=int, default=5, metavar="N", help="repetitions (default: %(default)s)")
    common.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    engine = verbs.add_parser("engine", parents=[common], help="engine against a bare Paddle loop")
    engine.add_argument(
        "--steps", type=int, default=20, metavar="N", help="updates of a round, a multiple of 10 (default: %(default)s)"
    )
    engine.add_argument(
        "-o", "--override", action="extend", nargs="+", default=[], metavar="KEY=VALUE", help="another model, say"
    )
    data = verbs.add_parser("data", parents=[common], help="opening a large corpus")
    data.add_argument("--documents", type=int, default=1_000_000, metavar="N", help="default: %(default)s")
    data.add_argument("--tokens", type=int, default=500_000_000, metavar="N", help="default: %(default)s")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    args = parse_args(argv)
    from ppfleetx.bench import machine, machine_line

    with tempfile.TemporaryDirectory(prefix="ppfleetx-bench-") as folder:
        try:
            if args.benchmark == "engine":
                from ppfleetx.bench.engine import engine_lines, measure_engine

                result = measure_engine(Path(folder), args.rounds, args.steps, args.override)
                lines = engine_lines(result)
            else:
                from ppfleetx.bench.data import data_lines, measure_data

                result = measure_data(Path(folder), args.documents, args.tokens, args.rounds)
                lines = data_lines(result)
        except UserError as error:
            from ppfleetx.engine.command import report

            return report(error)
    where = machine()
    print(machine_line(where), *lines, sep="\n")
    if args.json is not None:
        args.json.write_text(json.dumps({"machine": where, **result}, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
