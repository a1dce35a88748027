"""The fingerprint: of the values, never of how they are stored, and in little memory."""

from __future__ import annotations

import hashlib
import tempfile
import tracemalloc
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppfleetx.checkpoint import stream
from ppfleetx.checkpoint.fingerprint import fingerprint
from ppfleetx.layers.spec import ParameterSpec
from tests.unit.checkpoint.cuts import cut
from tests.unit.checkpoint.test_reshard import padded, save
from tests.unit.checkpoint.written import bfloat16, random_arrays, write_checkpoint


def brute_force(tensors):
    """(weights, state) of `<name>` or `<name>:<slot>` to array: SHA-256 of the tensors' SHA-256, sorted."""
    totals = {"weights": hashlib.sha256(), "state": hashlib.sha256()}
    names = {"float32": "F32", "uint16": "BF16", "float16": "F16"}
    for name, slot in sorted((*key.partition(":")[::2],) for key in tensors):
        values = tensors[f"{name}:{slot}" if slot else name]
        shape = "×".join(str(length) for length in values.shape)
        head = f"{name}\n{slot}\n{names[str(values.dtype)]}\n{shape}\n".encode()
        digest = hashlib.sha256(head + values.tobytes()).digest()
        for total in ["state"] if slot else ["weights", "state"]:
            totals[total].update(digest)
    return tuple(total.hexdigest() for total in totals.values())


@st.composite
def cut_twice(draw):
    """(true shape, two ways to hold a parameter of these rows, padded otherwise on either side)."""
    rows, *rest = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    specs = [ParameterSpec(name="a.weight", shape=(rows + draw(st.integers(0, 4)), *rest), rows=rows) for _ in range(2)]
    return (rows, *rest), [draw(cut(spec)) for spec in specs]


@given(cut_twice(), st.sampled_from([1, 8, 20, 1 << 20]))
@settings(derandomize=True, deadline=None, max_examples=60)
def test_it_is_that_of_the_whole_tensors_however_they_were_cut(case, piece_bytes):
    shape, held = case
    values = np.arange(1, 1 + prod(shape), dtype=np.float32).reshape(shape)
    scalar = np.array([0.9], np.float32)
    expected = brute_force({"a.weight": values, "a.weight:moment1": values + 0.5, "a.weight:beta1_pow": scalar})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "PIECE_BYTES", piece_bytes)
        for one in held:
            with tempfile.TemporaryDirectory() as folder:
                found = fingerprint(save(Path(folder), one, padded(values, one.spec.shape[0])))
                assert (found.weights, found.state) == expected


def test_every_kind_of_change_changes_it(tmp_path):
    arrays = random_arrays(("b", (3, 4), "float32"), ("a", (7,), "float16"), ("a:moment1", (7,), "float32"))
    arrays["c"] = bfloat16(arrays["b"])
    found = fingerprint(write_checkpoint(tmp_path / "one", arrays, parts=2, dim=1))
    assert (found.weights, found.state) == brute_force(arrays)
    assert list(found.tensors) == ["a", "a.moment1", "b", "c"]
    moved = {**arrays, "b": -arrays["b"]}
    moved["b"][:] = arrays["b"]
    assert fingerprint(write_checkpoint(tmp_path / "same", dict(reversed(moved.items())))) == found
    negative_zero = {**arrays, "b": np.where(arrays["b"] == arrays["b"][0, 0], -0.0, arrays["b"]).astype("float32")}
    zero = {**arrays, "b": np.where(arrays["b"] == arrays["b"][0, 0], 0.0, arrays["b"]).astype("float32")}
    changes = {
        "shape": {**arrays, "b": arrays["b"].reshape(4, 3)},
        "type": {**arrays, "c": arrays["c"].view("float16")},
        "name": {"d" if key == "c" else key: value for key, value in arrays.items()},
        "moment": {**arrays, "a:moment1": arrays["a:moment1"] + 1},
        "zero": zero,
        "negative zero": negative_zero,
    }
    states = {name: fingerprint(write_checkpoint(tmp_path / name, change)) for name, change in changes.items()}
    assert len({found.state, *(one.state for one in states.values())}) == 7
    assert states["moment"].weights == found.weights  # only the optimizer's part differs


def test_memory_does_not_grow_with_the_tensor(tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "PIECE_BYTES", 2**20)
    values = np.arange(2**23, dtype=np.float32).reshape(2**12, 2**11)  # 32 MiB, its columns in two files
    saved = write_checkpoint(tmp_path / "large", {"a": values}, parts=2, dim=1)
    expected = brute_force({"a": values})
    tracemalloc.start()
    try:
        found = fingerprint(saved)
        assert tracemalloc.get_traced_memory()[1] < 3 * 2**20
    finally:
        tracemalloc.stop()
    assert found.weights == expected[0]
