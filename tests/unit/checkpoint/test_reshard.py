"""A parameter written by one layout and read by another: padding, fused query/key/value, runs; bit by bit."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppfleetx.checkpoint.layout import PieceLayout
from ppfleetx.checkpoint.manifest import MANIFEST, verify
from ppfleetx.checkpoint.reader import Checkpoint
from ppfleetx.checkpoint.snapshot import Snapshot, Snapshots, TrainingState
from ppfleetx.checkpoint.writer import write_manifest, write_own
from ppfleetx.distributed.trainable import Piece
from ppfleetx.layers.spec import ParameterSpec
from tests.unit.checkpoint.cuts import Cut, cut, memory_of

QKV = ("a.q.weight", "a.k.weight", "a.v.weight")


def tensor_of(memory, spec, dtype="float32"):
    """A stand-in for a parameter: a tensor that carries its spec."""
    tensor = paddle.to_tensor(memory, dtype=dtype)
    tensor.spec = spec
    return tensor


def save(folder: Path, held: Cut, values: np.ndarray) -> Checkpoint:
    """Writes a parameter with one moment and one scalar, each piece by another rank; rank 99 holds a copy."""
    states = []
    for box, flat in held.pieces:
        tensor = tensor_of(memory_of(values, box, flat), held.spec)
        slots = {f"{held.spec.name}.moment1": tensor + 0.5, f"{held.spec.name}.beta1_pow": paddle.to_tensor([0.9])}
        states.append(TrainingState([Piece(held.spec.name, tensor, box, flat, True)], slots, {}, {"step": 3}, {}))
    copy = replace(states[0], pieces=[states[0].pieces[0]._replace(is_mine=False)])
    for rank, state in enumerate([*states, copy]):
        write_own(folder, rank, Snapshots().take(state))
    write_manifest(folder, len(states) + 1, Snapshot([], {}, {"step": 3}, {}))
    return Checkpoint(folder)


def padded(values: np.ndarray, rows: int) -> np.ndarray:
    full = np.zeros((rows, *values.shape[1:]), np.float32)
    full[: len(values)] = values
    return full


@st.composite
def padded_twice(draw):
    """(true shape, writer's cut, reader's cut) of a parameter whose rows are padded otherwise on either side."""
    rows, *rest = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    shapes = [(rows + draw(st.integers(0, 4)), *rest) for _ in range(2)]
    specs = [ParameterSpec(name="a.weight", shape=shape, rows=rows) for shape in shapes]
    return (rows, *rest), draw(cut(specs[0])), draw(cut(specs[1]))


@given(padded_twice())
@settings(derandomize=True, deadline=None, max_examples=60)
def test_padding_is_never_stored_and_read_as_zero(case):
    shape, writer, reader = case
    values = np.arange(1, 1 + prod(shape), dtype=np.float32).reshape(shape)
    with tempfile.TemporaryDirectory() as folder:
        # what stands in the padding must not matter
        there = padded(values, writer.spec.shape[0])
        there[shape[0] :] = -7
        saved = save(Path(folder), writer, there)
        assert verify(Path(folder)) == []
        assert saved.shapes() == {"a.weight": shape}
        assert np.array_equal(saved.read_whole("a.weight"), values)
        for slot, expected in (("", values), ("moment1", values + 0.5)):
            expected = padded(expected, reader.spec.shape[0])
            for box, flat in reader.pieces:
                assert np.array_equal(saved.read_piece(reader.spec, box, flat, slot), memory_of(expected, box, flat))
        assert saved.read_piece(reader.spec, *reader.pieces[0], "beta1_pow").tolist() == [np.float32(0.9)]


@st.composite
def interleaved(draw):
    """(writer's cut, reader's cut) of query, key and value in one parameter, with as many columns each or (GQA) not; the reader
    may have another number of groups."""
    groups, width = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    shares = draw(st.sampled_from([(), (3, 1, 1), (1, 2, 1)]))
    front = draw(st.sampled_from([(), (1,), (3,)]))
    shape = (*front, groups * (sum(shares) or 3) * width)
    spec = ParameterSpec(name="a.qkv.weight", shape=shape, parts=QKV, groups=groups, shares=shares)
    return draw(cut(spec)), draw(cut(replace(spec, groups=draw(st.sampled_from([1, groups])))))


@given(interleaved())
@settings(derandomize=True, deadline=None, max_examples=60)
def test_fused_query_key_value_is_stored_as_three_and_read_back(case):
    writer, reader = case
    spec = writer.spec
    shares = spec.shares or (1, 1, 1)
    width = spec.shape[-1] // sum(shares)  # of a part of share 1, all groups together
    matrices = [
        np.random.default_rng(number).permutation(prod(spec.shape[:-1]) * share * width).astype(np.float32)
        for number, share in enumerate(shares)
    ]
    matrices = [one.reshape(*spec.shape[:-1], -1) for one in matrices]

    def fused_as(spec):
        """The matrices cut in groups by columns, those of a group side by side."""
        groups = zip(*(np.split(one, spec.groups, axis=-1) for one in matrices), strict=True)
        return np.concatenate([part for group in groups for part in group], axis=-1)

    with tempfile.TemporaryDirectory() as folder:
        saved = save(Path(folder), writer, fused_as(spec))
        for name, matrix in zip(QKV, matrices, strict=True):
            assert np.array_equal(saved.read_whole(name), matrix)
            split = ParameterSpec(name=name, shape=matrix.shape)
            box = tuple((0, length) for length in matrix.shape)
            assert np.array_equal(saved.read_piece(split, box, None, "moment1"), matrix.reshape(-1) + 0.5)
            assert saved.read_whole(name, "beta1_pow").tolist() == [np.float32(0.9)]
        for box, flat in reader.pieces:
            assert np.array_equal(saved.read_piece(reader.spec, box, flat), memory_of(fused_as(reader.spec), box, flat))


@pytest.mark.parametrize("shares", [(), (4, 1, 1)])
def test_split_and_join_are_inverse_for_every_run(shares):
    spec = ParameterSpec(name="a.qkv.weight", shape=(2, 12), parts=QKV, groups=2, shares=shares)
    box = ((0, 2), (0, 12))
    memory = np.arange(24)
    for start in range(25):
        for stop in range(start, 25):
            layout = PieceLayout(spec, box, (start, stop))
            parts = layout.split(memory[start:stop])
            assert [part.size for part in parts] == [part.region.size for part in layout.parts]
            assert np.array_equal(layout.join(parts), memory[start:stop])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", "int64"])
def test_every_dtype_is_carried_bit_by_bit(tmp_path, dtype):
    from safetensors.paddle import load_file

    spec = ParameterSpec(name="a.weight", shape=(3, 5))
    tensor = tensor_of(np.random.default_rng(0).normal(size=(3, 5)) * 100, spec, dtype)
    piece = Piece("a.weight", tensor, ((0, 3), (0, 5)), None, True)
    write_own(tmp_path, 0, Snapshots().take(TrainingState([piece], {}, {}, {})))
    write_manifest(tmp_path, 1, Snapshot([], {}, {}, {}))
    memory = Checkpoint(tmp_path).read_piece(spec, ((0, 3), (0, 5)), None)
    again = paddle.to_tensor(memory)
    assert again.dtype == tensor.dtype
    assert memory.tobytes() == tensor.numpy().tobytes()
    # the file is what the safetensors package writes and reads
    other = load_file(str(tmp_path / "shard_00000.safetensors"))["a.weight"]
    assert other.dtype == tensor.dtype and other.numpy().tobytes() == memory.tobytes()


def test_a_rank_that_owns_nothing_writes_no_shard(tmp_path):
    held = Cut(
        ParameterSpec(name="a.weight", shape=(4, 2), rows=2), [(((0, 2), (0, 2)), None), (((2, 4), (0, 2)), None)]
    )
    save(tmp_path, held, np.ones((4, 2), np.float32))  # rank 1 holds padding only, rank 2 a copy
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [MANIFEST, "rank_00000.json", "rank_00001.json", "rank_00002.json", "shard_00000.safetensors"]


def test_a_tensor_that_nobody_wrote_whole_is_our_bug(tmp_path):
    held = Cut(ParameterSpec(name="a.weight", shape=(4, 2)), [(((0, 3), (0, 2)), None)])
    with pytest.raises(AssertionError, match=r"a.weight of shape \[4, 2\] has 6 elements"):
        save(tmp_path, held, np.ones((4, 2), np.float32))
