"""A checkpoint opened for reading: any region of any tensor, whoever wrote it. Imports no Paddle."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Set
from pathlib import Path
from typing import Any

import numpy as np

from ppfleetx.checkpoint.layout import Part, PieceLayout, padded_memory
from ppfleetx.checkpoint.manifest import Entry, read_manifest
from ppfleetx.checkpoint.regions import Box, Region, copy_common, touch, whole
from ppfleetx.checkpoint.shards import DTYPES, Damaged, Shard
from ppfleetx.layers.spec import ParameterSpec

#: slots that hold one number for a parameter, not one an element
SCALAR_SLOTS = frozenset({"beta1_pow", "beta2_pow"})
#: slot of float32 values beside half-precision weights, as earlier versions stored them; now the weights are float32
MASTER = "master"


class Checkpoint:
    """The complete checkpoint at `path`; reads from the files only what is asked for.

    Attributes:
        path: its folder.
        manifest: what it holds.

    Raises:
        Damaged: by any call, where files are not what the manifest says.
    """

    def __init__(self, path: Path):
        self.path = path
        self.manifest = read_manifest(path)
        self._shards: dict[str, Shard] = {}
        self._entries: dict[str, dict[str, list[Entry]]] = defaultdict(lambda: defaultdict(list))
        for entry in self.manifest.entries:
            self._entries[entry.name][entry.slot].append(entry)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Parameters by name: global shape without padding."""
        return {name: slots[""][0].shape for name, slots in self._entries.items() if "" in slots}

    def slots(self, spec: ParameterSpec) -> Set[str]:
        """What is stored for a parameter of the model, or for one of its parts: "" (the weight), moment1, …"""
        return {slot for name in (spec.parts or (spec.name,)) for slot in self.slots_of(name)}

    def slots_of(self, name: str) -> Set[str]:
        """What is stored under a name: "" (the weight), moment1, …"""
        return self._entries[name].keys()

    def all_slots(self) -> Set[str]:
        """What is stored for any parameter."""
        return {entry.slot for entry in self.manifest.entries}

    def read_piece(
        self,
        spec: ParameterSpec,
        box: Box,
        flat: tuple[int, int] | None,
        slot: str = "",
        default: np.ndarray | None = None,
    ) -> np.ndarray:
        """The memory of a rank's piece, 1-D; padding is zero. A slot that is one number for the parameter has size 1.

        Args:
            spec, box, flat: the piece's.
            slot: one that is stored for the parameter; for all of its parts, unless there is a default.
            default: the memory, float32, of which parts are taken that the checkpoint has not; then all comes in float32.
        """
        layout = PieceLayout(spec, box, flat)
        stored = [slot in self.slots_of(part.name) for part in layout.parts]
        if slot in SCALAR_SLOTS:
            return self.read(layout.parts[stored.index(True)].name, slot, whole((1,)))
        if default is None:
            memories = [self._read_part(part, slot) for part in layout.parts]
        else:
            given = zip(layout.parts, layout.split(default), stored, strict=True)
            memories = [float32(self._read_part(part, slot)) if there else own for part, own, there in given]
        return padded_memory(layout.join(memories), box, flat)

    def _read_part(self, part: Part, slot: str) -> np.ndarray:
        if (shape := self._entries[part.name][slot][0].shape) != part.shape:
            raise Damaged(f"{self.path}: {part.name} {slot} has shape {list(shape)}, not {list(part.shape)}")
        return self.read(part.name, slot, part.region)

    def read(self, name: str, slot: str, region: Region) -> np.ndarray:
        """The memory of a region of a stored tensor; not to be written to, it may be the file's own."""
        entries = self._entries[name][slot]
        if len(dtypes := {entry.dtype for entry in entries}) != 1:
            raise Damaged(f"{self.path}: {name} {slot} is stored in {sorted(dtypes)}")
        if same := [entry for entry in entries if entry.region == region]:
            return self._stored(same[0])
        memory = np.empty(region.size, DTYPES[entries[0].dtype])
        parts = [entry for entry in entries if touch(region, entry.region)]
        count = sum(copy_common(self._stored(entry), entry.region, memory, region) for entry in parts)
        if count != region.size:
            raise Damaged(f"{self.path}: {count} of {region.size} elements of {name} {slot} are in the files")
        return memory

    def read_whole(self, name: str, slot: str = "") -> np.ndarray:
        """All of a stored tensor, in its shape."""
        shape = self._entries[name][slot][0].shape
        return self.read(name, slot, whole(shape)).reshape(shape)

    def streams(self, rank: int) -> dict[str, Any]:
        """The random streams of a rank of the run that wrote it."""
        file = rank_file(rank)
        try:
            streams = json.loads((self.path / file).read_text(encoding="utf-8"))["streams"]
        except (KeyError, OSError, RecursionError, TypeError, ValueError) as error:
            raise Damaged(f"{self.path / file} cannot be read: {type(error).__name__} {error}") from None
        if not isinstance(streams, dict):
            raise Damaged(f"{self.path / file} holds no random streams")
        return streams

    def _stored(self, entry: Entry) -> np.ndarray:
        """The memory of an entry, mapped."""
        if entry.file not in self._shards:
            self._shards[entry.file] = Shard(self.path / entry.file)
        memory = self._shards[entry.file].memory(entry.key)
        if memory.dtype != DTYPES[entry.dtype] or memory.size != entry.region.size:
            raise Damaged(f"{self.path / entry.file}: {entry.key} is not what the manifest says")
        return memory


def float32(memory: np.ndarray) -> np.ndarray:
    """The same values; bfloat16, which NumPy does not know, comes as uint16: the upper half of a float32."""
    if memory.dtype == np.uint16:
        return (memory.astype(np.uint32) << 16).view(np.float32)
    return memory.astype(np.float32, copy=False)


def rank_file(rank: int) -> str:
    """The file of a rank's random streams."""
    return f"rank_{rank:05d}.json"
