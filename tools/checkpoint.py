"""Looks into checkpoints and converts them, without Paddle.

    python tools/checkpoint.py ls output/tiny_gpt
    python tools/checkpoint.py verify output/tiny_gpt/step_00000030
    python tools/checkpoint.py consolidate output/tiny_gpt/step_00000030 weights

Formats and conversions: ppfleetx/checkpoint/README.md. Exit codes: 0 done, and nothing is wrong or different; 1 something is
damaged, or the two differ; 2 a mistake in what the command was given. Nothing is ever overwritten.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a script from a clone: find the package beside us
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ppfleetx.checkpoint import inspect
from ppfleetx.checkpoint.reader import Checkpoint
from ppfleetx.checkpoint.shards import Damaged
from ppfleetx.config.errors import EXIT_USER_ERROR, Problem, UserError

EXIT_DIFFERENT = 1


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    from ppfleetx.convert.hf import MAX_SHARD_BYTES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, work: object, text: str) -> argparse.ArgumentParser:
        added = verbs.add_parser(name, help=text, description=text.capitalize() + ".")
        added.set_defaults(work=work)
        return added

    ls = verb("ls", _ls, "the checkpoints in a folder: step, whether complete, size, layout that wrote it, time")
    ls.add_argument("folder", type=Path, metavar="DIR", help="an output_dir, or one checkpoint")
    verify = verb("verify", _verify, "read every file and compare its checksum")
    verify.add_argument("paths", type=Path, nargs="+", metavar="PATH", help="checkpoints, or an output_dir")
    show = verb("show", _show, "progress, versions and tensors of a checkpoint, or the values of one tensor")
    show.add_argument("path", type=Path, metavar="PATH", help="a checkpoint: a step_N folder")
    show.add_argument("name", nargs="?", metavar="NAME", help="a tensor, NAME or NAME.SLOT: its least, most, mean, …")
    diff = verb("diff", _diff, "how two checkpoints differ; exit code 1 if a tensor does")
    diff.add_argument("a", type=Path, metavar="A")
    diff.add_argument("b", type=Path, metavar="B")
    diff.add_argument("--weights", action="store_true", help="leave out what the optimizer keeps")
    hashed = verb("hash", _hash, "a fingerprint of all values, the same whatever layout wrote them")
    hashed.add_argument("path", type=Path, metavar="PATH")
    hashed.add_argument("--tensors", action="store_true", help="of each tensor too")
    consolidate = verb("consolidate", _consolidate, "one plain file of weights, OUT/model.safetensors")
    consolidate.add_argument("path", type=Path, metavar="PATH")
    consolidate.add_argument("out", type=Path, metavar="OUT", help="a new folder, a checkpoint of weights itself")
    to_hf = verb("to-hf", _to_hf, "a Hugging Face folder of the weights")
    to_hf.add_argument("path", type=Path, metavar="PATH")
    to_hf.add_argument("out", type=Path, metavar="OUT_DIR", help="a new folder")
    to_hf.add_argument(
        "--max-shard-bytes", type=int, default=MAX_SHARD_BYTES, metavar="N",
        help="more than this is cut into several files with an index (default: %(default)s)",
    )  # fmt: skip
    from_hf = verb("from-hf", _from_hf, "a checkpoint of the weights in a Hugging Face folder")
    from_hf.add_argument("source", type=Path, metavar="HF_DIR")
    from_hf.add_argument("out", type=Path, metavar="OUT", help="a new folder")
    from_fleetx = verb("from-fleetx", _from_fleetx, "a checkpoint of the weights that PaddleFleetX saved")
    from_fleetx.add_argument("source", type=Path, metavar="DIR", help="a folder epoch_E_step_S")
    from_fleetx.add_argument("out", type=Path, metavar="OUT", help="a new folder")
    from_fleetx.add_argument(
        "-c",
        "--config",
        action="append",
        required=True,
        metavar="FILE",
        help="the run's YAML: its section Model counts",
    )
    from_fleetx.add_argument("-o", "--override", action="extend", nargs="+", default=[], metavar="KEY=VALUE")
    return parser.parse_args(argv)


def _ls(args: argparse.Namespace) -> int:
    rows = inspect.listing(args.folder)
    heads = ("checkpoint", "step", "size", "layout", "saved", "state")
    cells = [(r.name, r.step, inspect.readable(r.size_bytes), r.layout, r.saved, r.state) for r in rows]
    print(*inspect.table([heads, *cells]), sep="\n")
    return 0


def _verify(args: argparse.Namespace) -> int:
    bad = 0
    for path in [one for given in args.paths for one in inspect.checkpoints_in(given)]:
        faults = inspect.faults(path)
        bad += bool(faults)
        print(*([f"{path}: {fault}" for fault in faults] or [f"{path}: whole"]), sep="\n")
    return EXIT_DIFFERENT if bad else 0


def _show(args: argparse.Namespace) -> int:
    saved = _open(args.path)
    print(*(inspect.statistics(saved, args.name) if args.name else inspect.overview(saved)), sep="\n")
    return 0


def _diff(args: argparse.Namespace) -> int:
    from ppfleetx.checkpoint.compare import compare

    found = compare(_open(args.a), _open(args.b), args.weights)
    print(*found.settings, *found.tensors, sep="\n", end="\n" if found.settings or found.tensors else "")
    print(f"{len(found.tensors)} tensors differ, {found.num_equal} are equal to the bit")
    return EXIT_DIFFERENT if found.tensors else 0


def _hash(args: argparse.Namespace) -> int:
    from ppfleetx.checkpoint.fingerprint import fingerprint

    found = fingerprint(_open(args.path))
    if args.tensors:
        print(*(f"{digest}  {key}" for key, digest in found.tensors.items()), sep="\n")
    print(f"weights {found.weights}\nstate   {found.state}")
    return 0


def _consolidate(args: argparse.Namespace) -> int:
    from ppfleetx.checkpoint.weights import WEIGHTS, consolidate

    if args.out.suffix == ".safetensors":
        fix = f"{args.out.with_suffix('')} gives {args.out.with_suffix('') / WEIGHTS}"
        raise UserError(
            Problem("OUT", str(args.out), "a folder is made: the file of weights, and what a run needs to read it", fix)
        )
    count = consolidate(_open(args.path, whole=True), args.out)
    print(f"wrote {args.out / WEIGHTS}: {count} tensors. {_use(args.out)}")
    return 0


def _to_hf(args: argparse.Namespace) -> int:
    from ppfleetx.convert.hf import to_hf

    if args.max_shard_bytes < 1:
        raise UserError(Problem("--max-shard-bytes", args.max_shard_bytes, "it must be at least 1"))
    files = to_hf(_open(args.path, whole=True), args.out, args.max_shard_bytes)
    print(f"wrote {', '.join(files)} in {args.out}")
    return 0


def _from_hf(args: argparse.Namespace) -> int:
    from ppfleetx.convert.hf import from_hf

    return _converted(from_hf(args.source, args.out), args.out)


def _from_fleetx(args: argparse.Namespace) -> int:
    from ppfleetx.convert.fleetx import from_fleetx

    return _converted(from_fleetx(args.source, args.out, args.config, args.override), args.out)


def _converted(notes: list[str], out: Path) -> int:
    from ppfleetx.convert.converted import MODEL_YAML

    print(*(f"note: {note}" for note in notes), sep="\n", end="\n" if notes else "")
    print(
        f"wrote {out}. Its section Model is in {out / MODEL_YAML}: lay that over a config with a further -c. {_use(out)}"
    )
    return 0


def _use(out: Path) -> str:
    return f"To start from it: -o Engine.save_load.ckpt_dir={out} Engine.save_load.weights_only=true"


def _open(path: Path, whole: bool = False) -> Checkpoint:
    """The checkpoint at `path`.

    Args:
        whole: compare all checksums first: damage is not to travel into what is made of it.

    Raises:
        UserError: the folder is no checkpoint.
        Damaged: it is a broken one.
    """
    found = inspect.checkpoints_in(path)
    if found != [path]:
        names = ", ".join(one.name for one in found)
        raise UserError(Problem("PATH", str(path), "it is no checkpoint", f"it holds {names}: name one of them"))
    faults = inspect.faults(path) if whole else []
    if faults:
        raise Damaged(f"{path}: " + "; ".join(faults))
    try:
        return Checkpoint(path)
    except Damaged as error:
        raise Damaged(f"{path}: {error}") from None


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    args = parse_args(argv)
    try:
        return args.work(args)
    except UserError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return EXIT_USER_ERROR
    except (Damaged, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_DIFFERENT


if __name__ == "__main__":
    raise SystemExit(main())
