"""Reads the arrays of a Paddle `.pdparams` file, which is a pickle, and runs nothing that it says. Imports no Paddle.

A pickle is a program: it names classes and functions, and calls them. Here every name but a few is refused, and what the few
stand for is ours: not even NumPy's own functions for pickles are called.
"""

from __future__ import annotations

import collections
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np

from ppfleetx.checkpoint.shards import Damaged
from ppfleetx.config.errors import Problem, UserError

#: keys of Paddle's own: Paddle's names of the parameters; which slices large parameters were cut into
_NAME_TABLE, _SLICES = "StructuredToParameterName@@", "UnpackBigParamInfor@@"
_NUMBER = re.compile(r"[fiu][1248]|b1")


def load_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays in a file by name, read-only; bfloat16 is uint16 there. The file is read into memory.

    Raises:
        UserError: the file names something that is not an array, a number, a text or a plain container; the name is told.
        Damaged: it is no such file.
    """
    try:
        with open(path, "rb") as file:
            value = _ArraysOnly(file, path).load()
        if not isinstance(value, dict):
            raise TypeError(f"it holds a {type(value).__name__}, not parameters by name")
        value.pop(_NAME_TABLE, None)
        arrays = {str(name): _array(name, one) for name, one in value.items() if name != _SLICES}
        for name, cut in value.get(_SLICES, {}).items():
            arrays[name] = np.concatenate([arrays.pop(one) for one in cut["slices"]]).reshape(cut["OriginShape"])
        return arrays
    except UserError:
        raise
    except Exception as error:  # a malformed pickle fails in any way
        raise Damaged(f"{path} is no file of parameters: {type(error).__name__}: {error}") from None


class _DType:
    """Stands for `numpy.dtype`."""

    def __init__(self, code: str, *_: Any):
        self.code, self.order = code, "<"

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = state[1]

    def numpy(self) -> np.dtype[Any]:
        """The type, if it is one of numbers."""
        if not (isinstance(self.code, str) and _NUMBER.fullmatch(self.code) and self.order in ("<", ">", "|", "=")):
            raise ValueError(f"an array of {self.order}{self.code}, not of numbers")
        return np.dtype(self.code if self.order == "|" else self.order + self.code)


class _Array:
    """Stands for `numpy.ndarray`."""

    def __init__(self, *_: Any):
        self.values: np.ndarray | None = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, by_columns, data = state
        if not isinstance(data, bytes):
            raise ValueError("an array of objects")
        self.values = np.frombuffer(data, dtype.numpy()).reshape(shape, order="F" if by_columns else "C")


def _scalar(dtype: _DType, data: bytes) -> Any:
    """Stands for `numpy.core.multiarray.scalar`."""
    return np.frombuffer(data, dtype.numpy())[0]


def _encode(text: str, encoding: str) -> bytes:
    """Stands for `_codecs.encode`, with which old protocols write bytes."""
    if encoding != "latin1":
        raise ValueError(f"bytes as {encoding}")
    return text.encode("latin1")


_MULTIARRAY = ("numpy.core.multiarray", "numpy._core.multiarray")
_ALLOWED: dict[tuple[str, str], Any] = {
    **{(module, "_reconstruct"): _Array for module in _MULTIARRAY},
    **{(module, "scalar"): _scalar for module in _MULTIARRAY},
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _DType,
    ("_codecs", "encode"): _encode,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("builtins", "tuple"): tuple,  # Paddle writes a parameter as tuple((name, array))
    ("__builtin__", "tuple"): tuple,
}


class _ArraysOnly(pickle.Unpickler):
    """Knows the names above."""

    def __init__(self, file: Any, path: Path):
        super().__init__(file, encoding="latin1")
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        """What a name in the file stands for."""
        if (module, name) not in _ALLOWED:
            rule = (
                f"it asks for {module}.{name}; only arrays of numbers in plain containers are read, and nothing was run"
            )
            raise UserError(
                Problem("FILE", str(self._path), rule, "do not load this file with paddle.load unless you trust it")
            )
        return _ALLOWED[module, name]


def _array(name: Any, value: Any) -> np.ndarray:
    """A parameter's values, however Paddle wrote it."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str):
        value = value[1]
    if not isinstance(value, _Array) or value.values is None:
        raise TypeError(f"{name} is a {type(value).__name__}, not an array")
    return value.values
