"""What a rank writes of a run's state: the tensors that it alone owns, and its random streams."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ppfleetx.checkpoint.files import FileSum, write_file
from ppfleetx.checkpoint.layout import PieceLayout
from ppfleetx.checkpoint.manifest import MANIFEST, Entry, Manifest, uncovered
from ppfleetx.checkpoint.reader import SCALAR_SLOTS, rank_file
from ppfleetx.checkpoint.shards import NAMES, write_shard

if TYPE_CHECKING:
    import paddle

    from ppfleetx.distributed.trainable import Piece


@dataclass
class TrainingState:
    """All that a run needs to go on, as one rank holds it.

    Attributes:
        pieces: what this rank holds of the model.
        optimizer: moments and master weights of these pieces, `<logical name>.<slot>`.
        streams: the random streams of this rank (JSON values).
        progress: step, consumed samples, scaler and the like (JSON values).
        run: what writes it: resolved config, layout, versions (JSON values).
    """

    pieces: Sequence[Piece]
    optimizer: Mapping[str, paddle.Tensor]
    streams: dict[str, Any]
    progress: dict[str, Any]
    run: dict[str, Any] = field(default_factory=dict)


class _Held(NamedTuple):
    """A slot of a piece that this rank owns."""

    slot: str
    tensor: paddle.Tensor
    layout: PieceLayout


def write_own(folder: Path, rank: int, state: TrainingState) -> None:
    """Writes this rank's shard (if it owns anything), its random streams, and for rank 0 a report of both."""
    shard = f"shard_{rank:05d}.safetensors"
    held = list(_owned(state))
    entries = [entry for one in held for entry in _entries(one, shard)]
    files: dict[str, FileSum] = {}
    if entries:
        tensors = {entry.key: (entry.dtype, entry.stored_shape) for entry in entries}
        files[shard] = write_shard(folder / shard, tensors, (memory for one in held for memory in _memories(one)))
    streams = json.dumps({"streams": state.streams}).encode()
    files[rank_file(rank)] = write_file(folder / rank_file(rank), [streams])
    report = {"files": files, "entries": [asdict(entry) for entry in entries]}
    write_file(_report(folder, rank), [json.dumps(report).encode()])


def write_manifest(folder: Path, num_ranks: int, state: TrainingState) -> None:
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
    text = Manifest(files, entries, state.progress, state.run).to_text()
    write_file(folder / MANIFEST, [text.encode()])


def _owned(state: TrainingState) -> Iterator[_Held]:
    slots: dict[str, dict[str, paddle.Tensor]] = defaultdict(dict)
    for key, tensor in state.optimizer.items():
        name, _, slot = key.rpartition(".")
        slots[name][slot] = tensor
    for piece in state.pieces:
        if piece.is_first:
            layout = PieceLayout(piece.tensor.spec, piece.box, piece.flat)
            for slot, tensor in {"": piece.tensor, **slots[piece.name]}.items():
                yield _Held(slot, tensor, layout)


def _entries(held: _Held, file: str) -> list[Entry]:
    """One for each part of which this rank holds elements; a scalar is with who holds the first element."""
    slot, dtype = held.slot, NAMES[str(held.tensor.dtype).removeprefix("paddle.")]
    if slot in SCALAR_SLOTS:
        origins = [part.name for part in held.layout.parts if part.region.has_origin]
        return [Entry(name, slot, (1,), dtype, ((0, 1),), None, file) for name in origins]
    return [
        Entry(part.name, slot, part.shape, dtype, part.region.box, part.region.flat, file)
        for part in held.layout.parts
        if part.region.size
    ]


def _memories(held: _Held) -> list[np.ndarray]:
    """The values of `_entries`."""
    memory = held.tensor.numpy().reshape(-1)
    if held.slot in SCALAR_SLOTS:
        return [memory for part in held.layout.parts if part.region.has_origin]
    return [part for part in held.layout.split(memory) if part.size]


def _report(folder: Path, rank: int) -> Path:
    return folder / f"report_{rank:05d}.json"
