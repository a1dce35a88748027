"""A Hugging Face folder opened for reading. Imports no Paddle; files that are pickles are refused, not read."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ppfleetx.checkpoint.shards import Damaged, Shard
from ppfleetx.checkpoint.stream import PIECE_BYTES
from ppfleetx.config import Problem, UserError

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_FLOATS = ("F32", "F16", "BF16", "F64")
_SHOWN = 5


class Wanted(NamedTuple):
    """A tensor that a model needs.

    Attributes:
        shape: in their form.
        padded: further rows, if there are any, are vocabulary padding.
    """

    shape: tuple[int, ...]
    padded: bool


class Naming(NamedTuple):
    """What is known of names in the files.

    Attributes:
        prefix: what the files may leave out at the beginning.
        no_weights: names, without the prefix, of tensors to be passed over.
        tied: names of copies → what they are copies of.
    """

    prefix: str
    no_weights: re.Pattern[str]
    tied: Mapping[str, str]


class HFFolder:
    """config.json and the safetensors files beside it, mapped.

    Attributes:
        path: the folder.
        config: config.json.

    Raises:
        UserError: a file is missing.
        Damaged: a file is not what its name says.
    """

    def __init__(self, path: Path):
        self.path = path
        if not path.is_dir():
            rule = "it is a file; its folder is wanted" if path.exists() else "there is no such folder"
            raise UserError(Problem("HF_DIR", str(path), rule))
        self.config = self._json(CONFIG)
        self._shards = [Shard(path / name) for name in self._files()]
        self._places = {
            key: (shard, dtype, shape) for shard in self._shards for key, (dtype, shape) in shard.tensors().items()
        }
        self._wanted: dict[str, Wanted] = {}
        self._prefix = ""

    def fit(self, wanted: Mapping[str, Wanted], naming: Naming) -> list[str]:
        """Checks that the files hold what a model needs and nothing else; returns notes for the user.

        Raises:
            UserError: all tensors that are missing, too many, or of another shape or type, by name and shape.
        """
        self._wanted, self._prefix = dict(wanted), naming.prefix
        problems = [*self._missing(), *self._too_many(naming), *self._misfits()]
        problems = problems or self._untied(naming)
        if problems:
            raise UserError(*problems)
        return [
            f"{name}: rows {one.shape[0]} to {self.tensor(name)[1][0] - 1} are dropped: vocabulary padding, by config.json"
            for name, one in wanted.items()
            if self.tensor(name)[1] != one.shape
        ]

    def tensor(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(dtype, shape) of a tensor as it is in the files."""
        _, dtype, shape = self._places[self._key(name)]
        return dtype, shape

    def values(self, name: str) -> np.ndarray:
        """A tensor's values in the wanted shape, mapped: they are read when touched."""
        key = self._key(name)
        shard, _, shape = self._places[key]
        return shard.memory(key).reshape(shape)[: self._wanted[name].shape[0]]

    def _key(self, name: str) -> str:
        """Its name in these files."""
        return name if name in self._places else name.removeprefix(self._prefix)

    def _missing(self) -> list[Problem]:
        names = [name for name in self._wanted if self._key(name) not in self._places]
        texts = [f"{name} {list(self._wanted[name].shape)}" for name in names]
        return [self._problem("the model needs and the files lack", texts)] if names else []

    def _too_many(self, naming: Naming) -> list[Problem]:
        known = {self._key(name) for name in (*self._wanted, *naming.tied)}
        names = [key for key in self._places if key not in known and not self._passed_over(key, naming)]
        texts = [f"{key} {list(self._places[key][2])}" for key in names]
        return [self._problem("the files hold and the model lacks", texts)] if names else []

    def _passed_over(self, key: str, naming: Naming) -> bool:
        return naming.no_weights.fullmatch(key.removeprefix(naming.prefix)) is not None

    def _misfits(self) -> list[Problem]:
        problems = []
        for name, (wanted, padded) in self._wanted.items():
            if self._key(name) not in self._places:
                continue
            dtype, shape = self.tensor(name)
            if dtype not in _FLOATS:
                rule = f"it is of type {dtype}; weights are read as {', '.join(_FLOATS)}"
                problems.append(Problem(name, list(shape), rule, "give weights that are not quantised"))
            elif shape != wanted and not (padded and shape[1:] == wanted[1:] and shape[0] > wanted[0]):
                turned = len(shape) == 2 and shape == wanted[::-1]
                fix = "it lies transposed: transpose it in the file" if turned else ""
                problems.append(Problem(name, list(shape), f"by config.json its shape is {list(wanted)}", fix))
        return problems

    def _untied(self, naming: Naming) -> list[Problem]:
        """Copies that are none."""
        problems = []
        for copy, name in naming.tied.items():
            if self._key(copy) not in self._places:
                continue
            shard, dtype, shape = self._places[self._key(copy)]
            original = self.tensor(name)
            if (dtype, shape) != original or not _equal(shard.memory(self._key(copy)), self._all(name)):
                rule = f"the model ties it to {name} ({original[0]} {list(original[1])}), and its values are others"
                fix = "a head of its own needs tie_word_embeddings false in config.json, and a family that has one: not GPT"
                problems.append(Problem(copy, f"{dtype} {list(shape)}", rule, fix))
        return problems

    def _all(self, name: str) -> np.ndarray:
        key = self._key(name)
        return self._places[key][0].memory(key)

    def _problem(self, what: str, texts: list[str]) -> Problem:
        more = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
        return Problem("HF_DIR", str(self.path), f"{what} {', '.join(texts[:_SHOWN])}{more}")

    def _files(self) -> list[str]:
        """The names of the safetensors files."""
        if (self.path / SINGLE).exists():  # transformers, too, reads this one where there are both
            return [SINGLE]
        if not (self.path / INDEX).exists():
            there = ", ".join(sorted(child.name for child in self.path.iterdir()))
            fix = "save_pretrained of transformers writes safetensors; pickles (.bin, .pt) are never read"
            raise UserError(Problem("HF_DIR", str(self.path), f"it has no {SINGLE} and no {INDEX}, only {there}", fix))
        index = self._json(INDEX).get("weight_map")
        if not isinstance(index, dict) or not all(
            isinstance(name, str) and name == Path(name).name for name in index.values()
        ):
            raise UserError(
                Problem(INDEX, str(self.path / INDEX), "its weight_map must give the name of a file for each tensor")
            )
        counts = Counter(index.values())
        gone = [name for name in counts if not (self.path / name).is_file()]
        if gone:
            raise UserError(
                *(Problem(INDEX, name, f"this file is missing, with {counts[name]} tensors") for name in gone)
            )
        return list(counts)

    def _json(self, name: str) -> dict[str, Any]:
        try:
            value = json.loads((self.path / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(Problem("HF_DIR", str(self.path), f"it has no {name}")) from None
        except (OSError, RecursionError, ValueError) as error:
            raise Damaged(f"{self.path / name} cannot be read: {error}") from None
        if not isinstance(value, dict):
            raise Damaged(f"{self.path / name} holds no JSON object")
        return value


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two (mapped) arrays are equal to the bit, a piece at a time."""
    step = PIECE_BYTES // a.itemsize
    bits = f"u{a.itemsize}"
    return all(
        np.array_equal(a[start : start + step].view(bits), b[start : start + step].view(bits))
        for start in range(0, len(a), step)
    )
