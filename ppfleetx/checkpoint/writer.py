"""What a rank writes of a run's state: the tensors that are its share, and its random streams. Knows nothing of Paddle."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np

from ppfleetx.checkpoint.files import FileSum, write_file
from ppfleetx.checkpoint.manifest import MANIFEST, Entry, Manifest, uncovered
from ppfleetx.checkpoint.reader import SCALAR_SLOTS, rank_file
from ppfleetx.checkpoint.shards import write_shard
from ppfleetx.checkpoint.snapshot import Held, Snapshot


def write_own(folder: Path, rank: int, snapshot: Snapshot) -> None:
    """Writes this rank's shard (if it has anything to write), its random streams, and for rank 0 a report of both."""
    shard = f"shard_{rank:05d}.safetensors"
    held = snapshot.held
    entries = [entry for one in held for entry in _entries(one, shard)]
    files: dict[str, FileSum] = {}
    if entries:
        tensors = {entry.key: (entry.dtype, entry.stored_shape) for entry in entries}
        files[shard] = write_shard(folder / shard, tensors, (memory for one in held for memory in _memories(one)))
    streams = json.dumps({"streams": snapshot.streams}).encode()
    files[rank_file(rank)] = write_file(folder / rank_file(rank), [streams])
    report = {"files": files, "entries": [asdict(entry) for entry in entries]}
    write_file(_report(folder, rank), [json.dumps(report).encode()])


def write_manifest(folder: Path, num_ranks: int, snapshot: Snapshot) -> None:
    """Makes the reports of all ranks one manifest, and removes them."""
    files: dict[str, FileSum] = {}
    entries: list[Entry] = []
    for rank in range(num_ranks):
        report = json.loads(_report(folder, rank).read_text(encoding="utf-8"))
        files |= {name: FileSum(*summed) for name, summed in report["files"].items()}
        entries += [Entry.from_json(entry) for entry in report["entries"]]
    assert (gap := uncovered(entries)) is None, gap
    for rank in range(num_ranks):
        _report(folder, rank).unlink()
    text = Manifest(files, entries, snapshot.progress, snapshot.run).to_text()
    write_file(folder / MANIFEST, [text.encode()])


def _entries(held: Held, file: str) -> list[Entry]:
    """One for each part of which this rank holds elements; a scalar is with who holds the first element."""
    slot, dtype = held.slot, held.dtype
    if slot in SCALAR_SLOTS:
        origins = [part.name for part in held.layout.parts if part.region.has_origin]
        return [Entry(name, slot, (1,), dtype, ((0, 1),), None, file) for name in origins]
    return [
        Entry(part.name, slot, part.shape, dtype, part.region.box, part.region.flat, file)
        for part in held.layout.parts
        if part.region.size
    ]


def _memories(held: Held) -> list[np.ndarray]:
    """The values of `_entries`."""
    if held.slot in SCALAR_SLOTS:
        return [held.memory for part in held.layout.parts if part.region.has_origin]
    return [part for part in held.layout.split(held.memory) if part.size]


def _report(folder: Path, rank: int) -> Path:
    return folder / f"report_{rank:05d}.json"
