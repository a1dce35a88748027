"""What every node of a run must have alike: the settings, the code, the data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paddle

import ppfleetx
from ppfleetx.config import Config
from ppfleetx.config.coerce import to_tree
from ppfleetx.distributed import ParallelContext, Topology
from ppfleetx.engine.data import RunData, open_data

#: keys that may differ: where a node mounts its disks, how it reads, what its devices need
_OWN = ("input_dir", "output_dir", "ckpt_dir", "num_workers", "flags")


def settings(config: Config) -> dict[str, Any]:
    """For `ParallelContext.create`: every key that has a say in the numbers, and marks of the code."""
    sections = {name: value for name, value in to_tree(config).items() if name != "derived"}  # which follows from them
    return {**dict(_leaves("", sections)), "paddle.__version__": paddle.__version__, "code of ppfleetx": _code()}


def open_data_alike(
    config: Config, topology: Topology, context: ParallelContext, evaluated: str | None = None
) -> RunData:
    """`open_data` on all ranks, which must find the same tokens; every rank calls it.

    Raises:
        UserError: on all ranks, what any of them meets, or corpora that differ.
    """
    data = context.together(lambda: open_data(config, topology, evaluated))
    found = {"Train": data.train, data.evaluated: data.evaluation}
    context.same(
        {
            f"hash of the corpus of Data.{mode}.dataset.input_dir": dataset.corpus.mark[:12]
            for mode, dataset in found.items()
            if dataset is not None
        }
    )
    return data


def _leaves(path: str, tree: Any) -> Iterator[tuple[str, Any]]:
    """(path, value) of whatever is no section."""
    if not isinstance(tree, dict):
        yield path, tree
        return
    for name, value in tree.items():
        if name not in _OWN:
            yield from _leaves(f"{path}.{name}" if path else name, value)


def _code() -> str:
    """A hash of the package's source: two versions of it may compute different numbers, or wait for each other."""
    digest, root = hashlib.sha256(), Path(ppfleetx.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\n".encode() + path.read_bytes())
    return f"{ppfleetx.__version__}, {digest.hexdigest()[:12]}"
