"""Paddle's files of parameters, read without running what they say."""

from __future__ import annotations

import collections
import copyreg
import os
import pickle
from pathlib import Path

import numpy as np
import paddle
import pytest

from ppfleetx.checkpoint.shards import Damaged
from ppfleetx.config.errors import UserError
from ppfleetx.convert.pickles import load_arrays

RANDOM = np.random.default_rng(1)
VALUES = RANDOM.normal(size=(3, 4)).astype("float32")


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64", "int64", "bool"])
def test_what_paddle_saves(tmp_path, protocol, dtype):
    """A state dict (arrays and a table of names), and a mapping in which tensors are pairs (name, array)."""
    tensor = paddle.to_tensor(VALUES).astype(dtype)
    expected = tensor.numpy()
    paddle.save({"a.weight": tensor, "b": tensor}, str(tmp_path / "state"), protocol)
    found = load_arrays(tmp_path / "state")
    assert sorted(found) == ["a.weight", "b"]
    assert found["a.weight"].dtype == expected.dtype and np.array_equal(found["a.weight"], expected)
    paddle.save({"a": tensor, "epoch": 3}, str(tmp_path / "mixed"), protocol)
    assert tensor.name.encode() in (tmp_path / "mixed").read_bytes()
    with pytest.raises(Damaged, match="epoch is a int, not an array"):
        load_arrays(tmp_path / "mixed")
    paddle.save([tensor], str(tmp_path / "list"), protocol)
    with pytest.raises(Damaged, match="it holds a list"):
        load_arrays(tmp_path / "list")


def test_pairs_of_name_and_array(tmp_path):
    (tmp_path / "x").write_bytes(pickle.dumps(collections.OrderedDict(a=("linear_0.w_0", VALUES)), 4))
    assert np.array_equal(load_arrays(tmp_path / "x")["a"], VALUES)


def test_old_and_new_names_of_numpy(tmp_path):
    text = pickle.dumps({"a": VALUES, "b": np.asfortranarray(VALUES), "c": VALUES.astype(">f4")}, 2)
    assert b"numpy._core.multiarray" in text
    (tmp_path / "new").write_bytes(text)
    (tmp_path / "old").write_bytes(text.replace(b"numpy._core.multiarray", b"numpy.core.multiarray"))
    for name in ("new", "old"):
        assert all(np.array_equal(one, VALUES) for one in load_arrays(tmp_path / name).values())


def test_large_parameters_that_old_protocols_cut(tmp_path):
    """Paddle cuts what is larger than 1 GiB, and puts it together again; here a small one, as it would be."""
    from paddle.framework import io_utils

    flat = VALUES.reshape(-1)
    cut = {"OriginShape": (3, 4), "slices": ["a@@.0", "a@@.1"]}
    saved = {"a@@.0": flat[:7], "a@@.1": flat[7:], "UnpackBigParamInfor@@": {"a": cut}, "b": VALUES}
    assert np.array_equal(io_utils._pack_loaded_dict(dict(saved))["a"], VALUES)
    (tmp_path / "x").write_bytes(pickle.dumps(saved, 2))
    found = load_arrays(tmp_path / "x")
    assert sorted(found) == ["a", "b"] and np.array_equal(found["a"], VALUES)


class Calls:
    """Pickles as a call of a function."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
@pytest.mark.parametrize(
    ("function", "arguments", "name"),
    [
        (os.system, ("touch MARK",), "posix.system"),
        (eval, ("open('MARK', 'w')",), "(builtins|__builtin__).eval"),
        (exec, ("open('MARK', 'w')",), "(builtins|__builtin__).exec"),
        (open, ("MARK", "w"), "_?io.open"),
        (getattr, ("text", "upper"), "(builtins|__builtin__).getattr"),
        (np.save, ("MARK", 1), "numpy.save"),
        (Path, ("MARK",), "pathlib"),
    ],
)
def test_a_file_that_calls_something_is_refused_by_name(tmp_path, monkeypatch, protocol, function, arguments, name):
    monkeypatch.chdir(tmp_path)
    before = {} if protocol in (0, 5) else {"a": VALUES}  # in these, arrays are written with names that we do not read
    (tmp_path / "x").write_bytes(pickle.dumps({**before, "b": Calls(function, *arguments)}, protocol))
    with pytest.raises(UserError, match=f"asks for {name}.*nothing was run"):
        load_arrays(tmp_path / "x")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


HOSTILE = {
    "protocol 0": b"cos\nsystem\n(S'touch MARK'\ntR.",
    "INST": b"(S'touch MARK'\nios\nsystem\n.",
    "OBJ": b"(cos\nsystem\nS'touch MARK'\no.",
    "STACK_GLOBAL": b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\nTOUCH MARK\x85R.",
    "attribute of an allowed name": b"\x80\x04\x8c\x05numpy\x8c\x10ndarray.__reduce\x93.",
    "dotted name": b"\x80\x04\x8c\x08builtins\x8c\x0dtuple.__class\x93.",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_every_way_to_name_something_is_refused(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").write_bytes(HOSTILE[kind])
    with pytest.raises((UserError, Damaged)):
        load_arrays(tmp_path / "x")
    assert not (tmp_path / "MARK").exists()


def test_the_registry_of_extensions_is_no_way_round(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    copyreg.add_extension("posix", "system", 240)
    try:
        (tmp_path / "x").write_bytes(b"\x80\x02\x82\xf0U\nTOUCH MARK\x85R.")
        with pytest.raises(UserError, match=r"posix.system"):
            load_arrays(tmp_path / "x")
    finally:
        copyreg.remove_extension("posix", "system", 240)


@pytest.mark.parametrize(
    "value",
    [
        np.array([VALUES, None], dtype=object),
        np.array([(1, 2.0)], dtype="i4,f4"),
        np.array(["x"]),
        np.array(["2026-01-01"], dtype="M8[D]"),
        np.array([1j]),
    ],
)
def test_arrays_of_anything_but_numbers_are_refused(tmp_path, value):
    (tmp_path / "x").write_bytes(pickle.dumps({"a": value}, 4))
    with pytest.raises(Damaged, match="x is no file of parameters"):
        load_arrays(tmp_path / "x")


def wrong_state(shape, data):
    """A pickle of an array whose state says something else than its bytes."""

    class Array:
        def __reduce__(self):
            state = (1, shape, np.dtype("f4"), False, data)
            return VALUES.__reduce__()[0], (np.ndarray, (0,), b"b"), state

    return pickle.dumps({"a": Array()}, 4)


@pytest.mark.parametrize(
    ("shape", "data"), [((2, 3), b"1234"), ((-1,), b"123"), ("ab", b"1234"), ((1,), 7), ((1 << 62,), b"")]
)
def test_states_that_do_not_fit_are_refused(tmp_path, shape, data):
    (tmp_path / "x").write_bytes(wrong_state(shape, data))
    with pytest.raises(Damaged):
        load_arrays(tmp_path / "x")


@pytest.mark.parametrize(
    "content", [b"", b"\x80", b"PK\x03\x04 zip", b"N.", b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f"]
)
def test_files_that_are_no_pickle_of_parameters(tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(Damaged, match="/x is no file of parameters"):
        load_arrays(tmp_path / "x")


def test_random_damage_never_does_more_than_be_refused(tmp_path):
    """500 changed bytes, one at a time: either values come out, or one of the two refusals."""
    text = bytearray(pickle.dumps({"a": ("n", VALUES), "b": VALUES.astype("float16"), "c": np.float32(3)}, 4))
    random = np.random.default_rng(6)
    for _ in range(500):
        damaged = bytearray(text)
        damaged[random.integers(len(text))] = random.integers(256)
        (tmp_path / "x").write_bytes(damaged)
        try:
            found = load_arrays(tmp_path / "x")
        except (UserError, Damaged):
            continue
        assert all(isinstance(one, np.ndarray) for one in found.values())
