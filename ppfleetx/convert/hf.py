"""To and from Hugging Face folders: config.json, and model.safetensors or its shards with an index. Imports no Paddle.

What a family calls its tensors and settings is in `models/<family>/hf.py`; here is what is the same for all. Tensors pass
in pieces: a model of any size takes little memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ppfleetx.checkpoint.files import write_file
from ppfleetx.checkpoint.layout import stored_shapes
from ppfleetx.checkpoint.manifest import Entry
from ppfleetx.checkpoint.reader import Checkpoint
from ppfleetx.checkpoint.regions import Region, whole
from ppfleetx.checkpoint.shards import DTYPES, write_shard
from ppfleetx.checkpoint.stream import PIECE_BYTES, stored
from ppfleetx.checkpoint.weights import WEIGHTS, new_folder, whole_entry
from ppfleetx.config import Problem, UserError
from ppfleetx.convert.converted import model_config, write_converted
from ppfleetx.convert.hf_files import CONFIG, INDEX, HFFolder, Naming, Wanted
from ppfleetx.layers.spec import ParameterSpec
from ppfleetx.models.hf import HFForm, Link
from ppfleetx.models.registry import hf_forms, parameters

#: of every family
FORMS: tuple[HFForm, ...] = hf_forms()
#: bytes of weights in a file; transformers' own value
MAX_SHARD_BYTES = 5_000_000_000
_TORCH_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class _Tensor(NamedTuple):
    """A tensor to be written: its name there, and where it comes from."""

    link: Link
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].itemsize


def to_hf(saved: Checkpoint, out: Path, max_shard_bytes: int = MAX_SHARD_BYTES) -> list[str]:
    """Writes the weights of a checkpoint as a Hugging Face folder, dtypes kept; returns the names of the files.

    Raises:
        UserError: there is something at `out`, or the model has no form there.
        Damaged: a file of the checkpoint is not what its manifest says.
    """
    model = (saved.manifest.run.get("config") or {}).get("Model")
    if model is None:
        raise UserError(Problem("PATH", str(saved.path), "its manifest does not tell the section Model of the run"))
    titles = {title: form for form in FORMS for title in form.NAMES}
    form = _form("Model.name", model.get("name"), titles)
    weights = {name: entry for (name, slot), entry in stored(saved).items() if not slot}
    tensors = [_theirs(saved, weights, link) for link in form.links(model)]
    kinds = {tensor.dtype for tensor in tensors}
    config = {**form.to_config(model), "torch_dtype": _TORCH_NAMES[kinds.pop()] if len(kinds) == 1 else None}
    shards = _shards(tensors, max_shard_bytes)
    with new_folder(out) as folder:
        for name, inside in shards.items():
            write_shard(
                folder / name,
                {tensor.link.theirs: (tensor.dtype, tensor.shape) for tensor in inside},
                (piece for tensor in inside for piece in _their_pieces(saved, tensor)),
                {"format": "pt"},
            )
        if len(shards) > 1:
            names = {tensor.link.theirs: name for name, inside in shards.items() for tensor in inside}
            size = sum(tensor.size_bytes for tensor in tensors)
            _write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": names})
        _write_json(folder / CONFIG, config)
    return [*shards, *([INDEX] if len(shards) > 1 else []), CONFIG]


def from_hf(source: Path, out: Path) -> list[str]:
    """Writes a Hugging Face folder as a checkpoint of weights, dtypes kept, with `model.yaml` beside it; returns notes.

    Raises:
        UserError: there is something at `out`, or what is in `source` is not a model that we compute; all reasons at once.
        Damaged: a file of it is no safetensors file.
    """
    folder = HFFolder(source)
    types = {one.MODEL_TYPE: one for one in FORMS}
    form = _form(f"{CONFIG}: model_type", folder.config.get("model_type"), types)
    model, notes = form.from_config(folder.config)
    config = model_config(model)
    links = form.links(model)
    wanted = _wanted(links, [spec for spec in parameters(config).values() if not spec.tied_to])
    notes += folder.fit(wanted, Naming(form.PREFIX, form.NO_WEIGHTS, form.tied(model)))
    entries: list[Entry] = []
    for link in links:
        dtype, _ = folder.tensor(link.theirs)
        entries += [whole_entry(name, dtype, _our_shape(link, wanted[link.theirs].shape)) for name in link.ours]
    with new_folder(out) as aside:
        pieces = (
            piece
            for link in links
            for piece in _our_pieces(folder.values(link.theirs), folder.tensor(link.theirs)[0], link)
        )
        tensors = {entry.key: (entry.dtype, entry.shape) for entry in entries}
        summed = write_shard(aside / WEIGHTS, tensors, pieces, {"format": "ppfleetx"})
        write_converted(aside, {WEIGHTS: summed}, entries, model, f"Hugging Face folder {source.absolute()}")
    return notes


def _form(key: str, value: Any, forms: Mapping[str, HFForm]) -> HFForm:
    if not isinstance(value, str) or value not in forms:
        raise UserError(Problem(key, value, f"models that can be converted: {', '.join(forms)}"))
    return forms[value]


def _wanted(links: Sequence[Link], specs: Sequence[ParameterSpec]) -> dict[str, Wanted]:
    """The tensors of theirs that our parameters ask for."""
    shapes = {name: shape for spec in specs for name, shape in stored_shapes(spec).items()}
    padded = {spec.name for spec in specs if spec.rows is not None}
    assert sorted(shapes) == sorted(name for link in links for name in link.ours), "links and parameters of a family"
    return {
        link.theirs: Wanted(_their_shape(link, [shapes[name] for name in link.ours]), link.ours[0] in padded)
        for link in links
    }


def _theirs(saved: Checkpoint, weights: Mapping[str, Entry], link: Link) -> _Tensor:
    """Dtype and shape of a tensor of theirs, from those of ours."""
    if lacks := [name for name in link.ours if name not in weights]:
        rule = f"it has no parameter {', '.join(lacks)}, which {link.theirs} is made of"
        raise UserError(Problem("PATH", str(saved.path), rule))
    entries = [weights[name] for name in link.ours]
    assert len({entry.dtype for entry in entries}) == 1, link.ours
    return _Tensor(link, entries[0].dtype, _their_shape(link, [entry.shape for entry in entries]))


def _their_shape(link: Link, ours: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    assert len(set(ours)) == 1, f"{link.ours}: {ours}"
    *front, last = ours[0]
    shape = (*front, last * len(ours))
    return shape[::-1] if link.transposed else shape


def _our_shape(link: Link, theirs: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of each of ours in a tensor of theirs."""
    *front, last = theirs[::-1] if link.transposed else theirs
    return (*front, last // len(link.ours))


def _shards(tensors: Sequence[_Tensor], max_shard_bytes: int) -> dict[str, list[_Tensor]]:
    """Files by name: full ones in the given order, none above the limit unless one tensor is."""
    shards: list[list[_Tensor]] = [[]]
    for tensor in tensors:
        if shards[-1] and sum(one.size_bytes for one in shards[-1]) + tensor.size_bytes > max_shard_bytes:
            shards.append([])
        shards[-1].append(tensor)
    if len(shards) == 1:
        return {WEIGHTS: shards[0]}
    return {f"model-{number:05d}-of-{len(shards):05d}.safetensors": one for number, one in enumerate(shards, 1)}


def _their_pieces(saved: Checkpoint, tensor: _Tensor) -> Iterator[np.ndarray]:
    """The values of a tensor of theirs in row-major order, read from ours."""
    link, shape = tensor.link, tensor.shape
    if len(shape) == 1:
        for name in link.ours:
            yield saved.read(name, "", whole((shape[0] // len(link.ours),)))
        return
    assert len(shape) == 2, f"{link.theirs}: {shape}"
    rows, columns = shape
    if link.transposed:  # their rows are our columns, of one of ours after another
        rows //= len(link.ours)
        for name in link.ours:
            for start, stop in _steps(rows, columns, tensor.dtype, turned=True):
                block = saved.read(name, "", Region(((0, columns), (start, stop))))
                yield block.reshape(columns, stop - start).T.reshape(-1)
        return
    width = columns // len(link.ours)
    for start, stop in _steps(rows, columns, tensor.dtype):
        blocks = [saved.read(name, "", Region(((start, stop), (0, width)))) for name in link.ours]
        yield np.concatenate([block.reshape(-1, width) for block in blocks], axis=1).reshape(-1)


def _our_pieces(values: np.ndarray, dtype: str, link: Link) -> Iterator[np.ndarray]:
    """The values of ours one after another, in row-major order, from a (mapped) tensor of theirs."""
    values = values.T if link.transposed else values
    width = values.shape[-1] // len(link.ours)
    for number in range(len(link.ours)):
        part = values[..., number * width : (number + 1) * width]
        for start, stop in _steps(len(part), part.size // len(part), dtype, link.transposed):
            yield np.ascontiguousarray(part[start:stop]).reshape(-1)


def _steps(rows: int, columns: int, dtype: str, turned: bool = False) -> Iterator[tuple[int, int]]:
    """Runs of rows of about PIECE_BYTES; longer ones where columns of a file become rows, as each reads in all of the file."""
    step = max((4 if turned else 1) * PIECE_BYTES // (columns * DTYPES[dtype].itemsize), 1)
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def _write_json(path: Path, value: Any) -> None:
    write_file(path, [(json.dumps(value, indent=2) + "\n").encode()])
