"""From PaddleFleetX's GPT checkpoints: `model.pdparams`, of one card or one for each rank. Imports no Paddle.

`epoch_E_step_S/` holds the file itself, or `mp_XX_sharding_XX_pp_XX/model.pdparams` of each rank (ranks of a sharding group
hold the same weights). A rank's file becomes a shard of ours: only one of them is in memory at a time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ppfleetx.checkpoint.files import FileSum
from ppfleetx.checkpoint.layout import PieceLayout, stored_shapes
from ppfleetx.checkpoint.manifest import Entry, uncovered
from ppfleetx.checkpoint.regions import lengths
from ppfleetx.checkpoint.shards import write_shard
from ppfleetx.checkpoint.weights import new_folder
from ppfleetx.config import Config, Problem, UserError
from ppfleetx.config.load import load_tree
from ppfleetx.convert.converted import model_config, write_converted
from ppfleetx.convert.pickles import load_arrays
from ppfleetx.layers.spec import ParameterSpec
from ppfleetx.models.gpt.spec import parameters

_FILE = "model.pdparams"
_FOLDER = re.compile(r"mp_(\d+)_sharding_(\d+)_pp_(\d+)")
_DTYPES = {"float32": "F32", "float16": "F16", "uint16": "BF16", "float64": "F64"}

#: what their wrappers for several processes put before a name
_WRAPPER = re.compile(r"^(_layers?\.)+")
_EMBEDDING = re.compile(r"(?:.*\.)?(word|position)_embeddings\.weight")
#: a block by its number; or, under a pipeline, an element of the list [embedding, block × N, norm, …] by its place, which
#: an interleaved pipeline gives as first place of the chunk and place in it
_BLOCK = re.compile(r"gpt\.decoder\.layers\.(\d+)\.(.+)")
_ELEMENT = re.compile(r"(\d+)(?:\.(\d+))?\.(\D.*)")
_NORM = re.compile(r"gpt\.decoder\.norm\.(weight|bias)")
#: the element norm: a layer that holds one, or (in 2022) the norm itself
_LAST = re.compile(r"(?:norm\.)?(weight|bias)")
_INSIDE = {
    "self_attn.qkv_proj": "attention.qkv",
    "self_attn.q_proj": "attention.q",
    "self_attn.k_proj": "attention.k",
    "self_attn.v_proj": "attention.v",
    "self_attn.out_proj": "attention.out",
    "linear1": "mlp.up",
    "linear2": "mlp.down",
    "norm1": "norm1",
    "norm2": "norm2",
}
#: keys of their section Model that say how a run went, not what the model is
_RUN_KEYS = {
    "module", "use_recompute", "recompute_granularity", "no_recompute_layers", "virtual_pp_degree", "sequence_parallel",
    "fused_linear", "fused_softmax_with_triangular", "use_flash_attn", "pretrained", "num_classes", "loss", "metric",
}  # fmt: skip


class _Part(NamedTuple):
    """One file."""

    path: Path
    mp_rank: int
    pp_rank: int


def from_fleetx(source: Path, out: Path, config_files: Sequence[str], overrides: Sequence[str] = ()) -> list[str]:
    """Writes the weights as a checkpoint, dtypes kept, with `model.yaml` beside it; returns notes for the user.

    Args:
        config_files, overrides: the run's own YAML; of it the section Model counts (the files do not tell the heads).

    Raises:
        UserError: there is something at `out`, or the files are not of this model, or ask for more than arrays.
        Damaged: a file is no file of parameters.
    """
    model = model_section(config_files, overrides)
    config = model_config(model)
    if config.Model.family != "GPT":
        raise UserError(
            Problem("Model.name", config.Model.name, "PaddleFleetX's checkpoints are of GPT", "Model.name=GPT")
        )
    parts = _parts(source)
    job = _Job(config, 1 + max(part.mp_rank for part in parts))
    with new_folder(out) as aside:
        files = dict(written for part in parts if (written := _write_part(job, part, aside)) is not None)
        job.check_complete(source)
        write_converted(aside, files, job.entries, model, f"PaddleFleetX checkpoint {source.absolute()}")
    return [*job.notes, *_left_out(parts)]


def model_section(config_files: Sequence[str], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """What the section Model of their YAML says of the model itself."""
    tree, _ = load_tree(config_files, overrides)
    return {name: value for name, value in (tree.get("Model") or {}).items() if name not in _RUN_KEYS}


def _write_part(job: _Job, part: _Part, folder: Path) -> tuple[str, FileSum] | None:
    """Makes a shard of what is new in a file; None: nothing is."""
    shard = f"shard_{part.pp_rank * job.mp_degree + part.mp_rank:05d}.safetensors"
    held = job.take(part, load_arrays(part.path), shard)
    tensors = {entry.key: (entry.dtype, entry.stored_shape) for one in held for entry in one.entries}
    memories = (memory for one in held for memory in one.memories())
    return (shard, write_shard(folder / shard, tensors, memories)) if held else None


class _Held(NamedTuple):
    """An array of a file that is written: a piece of a parameter."""

    array: np.ndarray
    layout: PieceLayout
    entries: list[Entry]

    def memories(self) -> list[np.ndarray]:
        """The values of the entries."""
        return [one for one in self.layout.split(np.ascontiguousarray(self.array).reshape(-1)) if one.size]


class _Job:
    """What has been found so far.

    Attributes:
        entries: of all shards.
        notes: for the user.
    """

    def __init__(self, config: Config, mp_degree: int):
        self.config, self.mp_degree = config, mp_degree
        self.entries: list[Entry] = []
        self.notes: list[str] = []
        self._seen: set[tuple[str, tuple[tuple[int, int], ...]]] = set()

    def take(self, part: _Part, arrays: Mapping[str, np.ndarray], shard: str) -> list[_Held]:
        """What is new in a file. UserError names every array that the model lacks or has with another shape."""
        names = {key: logical_name(key, self.config.Model.num_layers) for key in arrays}
        specs = self._specs(fused=any(name and ".qkv." in name for name in names.values()))
        unknown = [f"{key} {list(arrays[key].shape)}" for key, name in names.items() if name not in specs]
        problems = [self._problem(part, f"the file holds and the model lacks {text}") for text in unknown]
        held = []
        for key, array in arrays.items():
            if (name := names[key]) not in specs:
                continue
            assert name is not None
            spec = self._with_rows(specs[name], array)
            box = spec.box(part.mp_rank, self.mp_degree)
            if array.shape != lengths(box) or str(array.dtype) not in _DTYPES:
                problems.append(
                    self._problem(part, f"{key} is {array.dtype} {list(array.shape)}; {self._wants(spec, box)}")
                )
            elif (name, box) not in self._seen:
                self._seen.add((name, box))
                held.append(self._hold(array, PieceLayout(spec, box, None), shard))
        if problems:
            raise UserError(*problems[:10])
        self.entries += [entry for one in held for entry in one.entries]
        return held

    def check_complete(self, source: Path) -> None:
        """UserError if a parameter of the model is in none of the files, or not all of it."""
        found = {entry.name for entry in self.entries}
        specs = self._specs(fused=False).values()
        lacks = [
            f"{name} {list(shape)}"
            for spec in specs
            for name, shape in stored_shapes(spec).items()
            if name not in found
        ]
        if lacks:
            more = f" and {len(lacks) - 5} more" if len(lacks) > 5 else ""
            raise UserError(
                Problem("DIR", str(source), f"the model needs and the files lack {', '.join(lacks[:5])}{more}")
            )
        if (gap := uncovered(self.entries)) is not None:
            raise UserError(Problem("DIR", str(source), gap))

    def _specs(self, fused: bool) -> dict[str, ParameterSpec]:
        config = replace(self.config, Model=replace(self.config.Model, fuse_attn_qkv=fused))
        return {name: spec for name, spec in parameters(config).items() if not spec.tied_to}

    def _with_rows(self, spec: ParameterSpec, array: np.ndarray) -> ParameterSpec:
        """The parameter with as much vocabulary padding as the files have."""
        if spec.rows is None or array.ndim != 2 or len(array) * self.mp_degree < spec.rows:
            return spec
        rows = len(array) * self.mp_degree
        note = f"{spec.name}: rows {spec.rows} to {rows - 1} are vocabulary padding, by Model.vocab_size, and left out"
        if rows > spec.rows and note not in self.notes:
            self.notes.append(note)
        return replace(spec, shape=(rows, *spec.shape[1:]))

    def _hold(self, array: np.ndarray, layout: PieceLayout, shard: str) -> _Held:
        dtype = _DTYPES[str(array.dtype)]
        parts = [part for part in layout.parts if part.region.size]
        return _Held(
            array,
            layout,
            [Entry(one.name, "", one.shape, dtype, one.region.box, one.region.flat, shard) for one in parts],
        )

    def _wants(self, spec: ParameterSpec, box: Any) -> str:
        cut = f" (one of {self.mp_degree} parts of {list(spec.shape)})" if lengths(box) != spec.shape else ""
        return f"by the section Model {spec.name} has {list(lengths(box))}{cut} and is a floating-point array"

    def _problem(self, part: _Part, rule: str) -> Problem:
        return Problem("FILE", str(part.path), rule, "the section Model of -c must be that of the run that wrote it")


def logical_name(key: str, num_layers: int) -> str | None:
    """Our name of one of their parameters, whichever of their models (single, hybrid, pipeline) has it; None: unknown."""
    key = _WRAPPER.sub("", key)
    if embedding := _EMBEDDING.fullmatch(key):
        return f"embedding.{embedding[1]}.weight"
    if norm := _NORM.fullmatch(key):
        return f"norm.{norm[1]}"
    if block := _BLOCK.fullmatch(key):
        return _in_block(int(block[1]), block[2])
    if element := _ELEMENT.fullmatch(key):
        place = int(element[1]) + int(element[2] or 0)
        if place == num_layers + 1 and (norm := _LAST.fullmatch(element[3])):
            return f"norm.{norm[1]}"
        return _in_block(place - 1, element[3])
    return None


def _in_block(number: int, inside: str) -> str | None:
    path, _, kind = inside.rpartition(".")
    return f"blocks.{number}.{_INSIDE[path]}.{kind}" if path in _INSIDE else None


def _parts(source: Path) -> list[_Part]:
    """The files of one copy of the weights, pipeline stage by stage."""
    if not source.is_dir():
        rule = "it is a file; its folder is wanted" if source.exists() else "there is no such folder"
        raise UserError(Problem("DIR", str(source), rule))
    found: dict[tuple[int, int], Path] = {}
    for child in sorted(source.iterdir(), reverse=True):  # of a sharding group the first that has the file
        if match := _FOLDER.fullmatch(child.name):
            place = int(match[3]), int(match[1])
            if place not in found or (child / _FILE).is_file():
                found[place] = child / _FILE
    if (source / _FILE).is_file():
        if found:
            rule = (
                f"it has {_FILE} of one card and folders {found[min(found)].parent.name}, … of several: two checkpoints"
            )
            raise UserError(Problem("DIR", str(source), rule, "move away what is not wanted"))
        return [_Part(source / _FILE, 0, 0)]
    if not found:
        inside = sorted(child.name for child in source.glob("epoch_*_step_*"))
        fix = f"it holds {', '.join(inside)}: name one of them" if inside else "name a folder epoch_E_step_S"
        raise UserError(Problem("DIR", str(source), f"it has no {_FILE} and no folders mp_XX_sharding_XX_pp_XX", fix))
    stages, ranks = (1 + max(numbers) for numbers in zip(*found, strict=True))
    grid = [(pp, mp) for pp in range(stages) for mp in range(ranks)]
    gone = [f"mp_{mp:02d}_sharding_00_pp_{pp:02d}/{_FILE}" for pp, mp in grid if not _is_file(found.get((pp, mp)))]
    if gone:
        rule = f"its folders are of mp {ranks} × pp {stages}, and {', '.join(gone)} is missing"
        raise UserError(Problem("DIR", str(source), rule, "copy the missing folders, or name the right one"))
    return [_Part(found[pp, mp], mp, pp) for pp, mp in grid]


def _is_file(path: Path | None) -> bool:
    return path is not None and path.is_file()


def _left_out(parts: Sequence[_Part]) -> list[str]:
    """What is not converted."""
    notes = []
    for name, what in {
        "model_state.pdopt": "optimizer states",
        "meta_state.pdopt": "epoch, step and random state",
    }.items():
        if count := sum((part.path.parent / name).is_file() for part in parts):
            notes.append(
                f"not converted: {what} ({name}, {count} file{'s' if count > 1 else ''}): a run starts anew with these weights"
            )
    return notes
