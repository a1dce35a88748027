"""Looks into checkpoints and converts them, without Paddle.

    python tools/checkpoint.py ls output/tiny_gpt
    python tools/checkpoint.py verify output/tiny_gpt/step_00000030
    python tools/checkpoint.py consolidate output/tiny_gpt/step_00000030 weights

Formats and conversions: ppfleetx/checkpoint/README.md. Exit codes: 0 done, and nothing is wrong or different; 1 something is
damaged, or the two differ; 2 a mistake in what the command was given, or it may not write there, or the disk is full.
Nothing is ever overwritten.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import yaml

if __package__ in (None, ""):  # run as a script from a clone: find the package beside us
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ppfleetx.checkpoint import inspect
from ppfleetx.checkpoint.reader import Checkpoint
from ppfleetx.checkpoint.shards import Damaged
from ppfleetx.config.errors import EXIT_USER_ERROR, Problem, UserError

EXIT_DIFFERENT = 1


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, work: Callable[[argparse.Namespace], int], text: str) -> Callable[..., argparse.Action]:
        added = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        added.set_defaults(work=work)
        return added.add_argument

    _add_looking(verb)
    _add_converting(verb)
    return parser.parse_args(argv)


def _add_looking(verb: Callable[..., Callable[..., argparse.Action]]) -> None:
    add = verb("ls", _ls, "the checkpoints in a folder: step, size, layout that wrote it, time, whether complete")
    add("folder", type=Path, metavar="DIR", help="an output_dir, or one checkpoint")
    add = verb("verify", _verify, "read every file and compare its checksum")
    add("paths", type=Path, nargs="+", metavar="PATH", help="checkpoints, or an output_dir")
    add = verb("show", _show, "progress, versions and tensors of a checkpoint, or the values of one tensor")
    add("path", type=Path, metavar="PATH", help="a checkpoint: a step_N folder")
    add("name", nargs="?", metavar="NAME", help="a tensor, NAME or NAME.SLOT: its least, most, mean, …")
    add("--config", action="store_true", help="the resolved YAML of the run that wrote it")
    add = verb("diff", _diff, "how two checkpoints differ; exit code 1 if a tensor does")
    add("a", type=Path, metavar="A")
    add("b", type=Path, metavar="B")
    add("--weights", action="store_true", help="leave out what the optimizer keeps")
    add = verb("hash", _hash, "a fingerprint of all values, the same whatever layout wrote them")
    add("path", type=Path, metavar="PATH")
    add("--tensors", action="store_true", help="of each tensor too")


def _add_converting(verb: Callable[..., Callable[..., argparse.Action]]) -> None:
    from ppfleetx.convert.hf import MAX_SHARD_BYTES

    add = verb("consolidate", _consolidate, "one plain file of weights, OUT/model.safetensors or OUT")
    add("path", type=Path, metavar="PATH")
    add(
        "out", type=Path, metavar="OUT", help="a new folder, which a run can start from; or a new file NAME.safetensors"
    )
    add = verb("to-hf", _to_hf, "a Hugging Face folder of the weights")
    add("path", type=Path, metavar="PATH")
    add("out", type=Path, metavar="OUT_DIR", help="a new folder")
    many = "more than this goes into several files with an index (default: %(default)s)"
    add("--max-shard-bytes", type=int, default=MAX_SHARD_BYTES, metavar="N", help=many)
    add = verb("from-hf", _from_hf, "a checkpoint of the weights in a Hugging Face folder")
    add("source", type=Path, metavar="HF_DIR")
    add("out", type=Path, metavar="OUT", help="a new folder")
    add = verb("from-fleetx", _from_fleetx, "a checkpoint of the weights that PaddleFleetX saved")
    add("source", type=Path, metavar="DIR", help="a folder epoch_E_step_S")
    add("out", type=Path, metavar="OUT", help="a new folder")
    add(
        "-c",
        "--config",
        action="append",
        required=True,
        metavar="FILE",
        help="the run's YAML: its section Model counts",
    )
    add("-o", "--override", action="extend", nargs="+", default=[], metavar="KEY=VALUE")


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
    if args.config:
        print(yaml.safe_dump(saved.manifest.run.get("config"), sort_keys=False), end="")
        return 0
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

    count = consolidate(_open(args.path, whole=True), args.out)
    alone = args.out.suffix == ".safetensors"
    print(
        f"wrote {args.out if alone else args.out / WEIGHTS}: {count} tensors." + ("" if alone else f" {_use(args.out)}")
    )
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
    return f"To start from it: -o {shlex.quote(f'Engine.save_load.ckpt_dir={out}')} Engine.save_load.weights_only=true"


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
        code = args.work(args)
        print(end="", flush=True)  # here, where a reader that has gone is seen
        return code
    except UserError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return EXIT_USER_ERROR
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:  # nothing half-written is left
        return 128 + signal.SIGINT
    except Damaged as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_DIFFERENT
    except OSError as error:  # no permission, disk full, …
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR


if __name__ == "__main__":
    raise SystemExit(main())
