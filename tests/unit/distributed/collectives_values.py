"""The values and comparisons of collectives_worker.py."""

from __future__ import annotations

import numpy as np
import paddle

FLOATS = ["float32", "float64", "float16", "bfloat16"]
DTYPES = [*FLOATS, "int8", "uint8", "int16", "int32", "int64", "bool"]


def draw(seed, shape, dtype="float32"):
    """The values that `seed` stands for, as float64."""
    low, high = (0, 2) if dtype == "bool" else (0, 4) if dtype == "uint8" else (-3, 4)
    return np.random.default_rng(seed).integers(low, high, shape).astype(np.float64)


def tensor(values, dtype="float32"):
    return paddle.to_tensor(values).astype(dtype)


def same(got, expected):
    np.testing.assert_array_equal(got.astype("float64").numpy(), expected)


def refused(error, words, function, *arguments, **options):
    try:
        function(*arguments, **options)
    except error as found:
        assert all(word in str(found) for word in words), found
    else:
        raise AssertionError(f"not refused: {words}")
