"""A checkpoint opened for reading: any region of any tensor, whoever wrote it. Imports no Paddle."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from ppfleetx.checkpoint.layout import PieceLayout, padded_memory
from ppfleetx.checkpoint.manifest import Entry, read_manifest
from ppfleetx.checkpoint.regions import Box, Region, copy_common, touch, whole
from ppfleetx.checkpoint.shards import DTYPES, Damaged, Shard
from ppfleetx.layers.spec import ParameterSpec

#: slots that hold one number for a parameter, not one an element
SCALAR_SLOTS = frozenset({"beta1_pow", "beta2_pow"})


class Checkpoint:
    """The complete checkpoint at `path`; reads from the files only what is asked for. A dtype is F32, BF16, …

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

    def dtypes(self, spec: ParameterSpec) -> dict[str, str]:
        """The slots stored for a parameter of the model ("" the weight), each with its dtype."""
        name = spec.parts[0] if spec.parts else spec.name
        return {slot: entries[0].dtype for slot, entries in self._entries[name].items()}

    def read_piece(self, spec: ParameterSpec, box: Box, flat: tuple[int, int] | None, slot: str = "") -> np.ndarray:
        """The memory of a rank's piece, 1-D; padding is zero. A slot that is one number for the parameter has size 1."""
        layout = PieceLayout(spec, box, flat)
        if slot in SCALAR_SLOTS:
            return self.read(layout.parts[0].name, slot, whole((1,)))
        memories = [self.read(part.name, slot, part.region) for part in layout.parts]
        return padded_memory(layout.join(memories), box, flat)

    def read(self, name: str, slot: str, region: Region) -> np.ndarray:
        """The memory of a region of a stored tensor."""
        entries = self._entries[name][slot]
        if len({entry.dtype for entry in entries}) != 1:
            raise Damaged(f"{self.path}: {name} {slot} is stored in {sorted({entry.dtype for entry in entries})}")
        memory = np.empty(region.size, DTYPES[entries[0].dtype])
        count = sum(self._copy(entry, memory, region) for entry in entries)
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
            return json.loads((self.path / file).read_text(encoding="utf-8"))["streams"]
        except (OSError, KeyError, ValueError) as error:
            raise Damaged(f"{self.path / file} cannot be read: {error}") from None

    def _copy(self, entry: Entry, memory: np.ndarray, region: Region) -> int:
        if not touch(region, entry.region):
            return 0
        if entry.file not in self._shards:
            self._shards[entry.file] = Shard(self.path / entry.file)
        source = self._shards[entry.file].memory(entry.key)
        if source.dtype != memory.dtype or source.size != entry.region.size:
            raise Damaged(f"{self.path / entry.file}: {entry.key} is not what the manifest says")
        return copy_common(source, entry.region, memory, region)


def rank_file(rank: int) -> str:
    """The file of a rank's random streams."""
    return f"rank_{rank:05d}.json"
