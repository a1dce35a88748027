"""Initial numbers do not depend on how a parameter is cut (case C39)."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppfleetx.distributed import init_stream
from ppfleetx.distributed.init_stream import InitStream


def whole(seed, name, size, block):
    """The definition, written again: one generator a block, keyed by (seed, name), counting from block · 2^192."""
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16], "little")
    parts = []
    for number, start in enumerate(range(0, size, block)):
        bits = np.random.Philox(key=key, counter=number << 192)
        parts.append(np.random.Generator(bits).standard_normal(min(block, size - start), dtype=np.float32))
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)


@st.composite
def shapes_and_boxes(draw):
    shape = draw(st.lists(st.integers(1, 13), min_size=1, max_size=3))
    box = []
    for size in shape:
        start = draw(st.integers(0, size))
        box.append(slice(start, draw(st.integers(start, size))))
    return shape, tuple(box)


@settings(max_examples=300, deadline=None)
@given(case=shapes_and_boxes(), block=st.sampled_from([1, 2, 7, 64, 65536]))
def test_any_box_is_cut_from_the_whole(case, block):
    shape, box = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(init_stream, "BLOCK", block)
        got = InitStream(7, "a.b").normal(shape, 0.5, box, mean=1.0)
    expected = whole(7, "a.b", int(np.prod(shape)), block) * np.float32(0.5) + np.float32(1.0)
    assert got.dtype == np.float32 and got.flags.c_contiguous
    np.testing.assert_array_equal(got, expected.reshape(shape)[box])


@pytest.mark.parametrize(
    "box",
    [
        (slice(None), slice(None)),
        (slice(100, 201), slice(None)),
        (slice(0, 301), slice(1, 700)),
        (slice(7, 8), slice(699, 700)),
        (slice(0, 301), slice(350, 351)),
    ],
)
def test_boxes_over_true_blocks(box):
    shape = (301, 701)  # 211,001 elements: four blocks, no line ends where a block does
    expected = whole(1024, "w", 301 * 701, init_stream.BLOCK).reshape(shape)[box]
    np.testing.assert_array_equal(InitStream(1024, "w").normal(shape, box=box), expected)


def test_only_touched_blocks_are_drawn(monkeypatch):
    drawn = []
    draw = InitStream._draw
    monkeypatch.setattr(InitStream, "_draw", lambda self, block, n: drawn.append((block, n)) or draw(self, block, n))
    InitStream(1, "w").normal((1024, 1024), box=(slice(100, 200), slice(None)))
    assert [block for block, _ in drawn] == [1, 2, 3]  # a block is 64 rows
    assert drawn[-1][1] == 8 * 1024  # and of the last one only what is needed


def test_streams_differ_by_name_and_seed():
    values = [InitStream(seed, name).normal([1000]) for seed, name in [(1, "a"), (2, "a"), (1, "b"), (11, "a")]]
    for i, one in enumerate(values):
        for other in values[i + 1 :]:
            assert abs(np.corrcoef(one, other)[0, 1]) < 0.15


def test_statistics():
    values = InitStream(3, "w").normal((1000, 1000), std=0.02)
    assert abs(values.mean()) < 0.02 * 4 / 1000
    assert abs(values.std() / 0.02 - 1) < 0.004
    # neighbours across a block's edge are as independent as any
    flat = values.reshape(-1)
    edges = np.arange(init_stream.BLOCK, flat.size, init_stream.BLOCK)
    assert abs((flat[edges - 1] * flat[edges]).mean()) < 4 * 0.02**2 / np.sqrt(len(edges))


def test_golden_values():
    """Fixed for ever: a run's initial weights are part of what a seed means."""
    got = InitStream(1024, "blocks.0.attention.qkv.weight").normal([4])
    np.testing.assert_array_equal(got, np.array(GOLDEN, dtype=np.float32))
    beyond = InitStream(1024, "blocks.0.attention.qkv.weight").normal([70000], box=[slice(65536, 65539)])
    np.testing.assert_array_equal(beyond, np.array(GOLDEN_BLOCK_1, dtype=np.float32))


GOLDEN = [0.9856758713722229, -1.7398064136505127, 1.0896023511886597, -0.2907900810241699]
GOLDEN_BLOCK_1 = [-0.5471289157867432, 0.5559993386268616, 0.15655174851417542]


def test_scalars_and_empty_boxes():
    assert InitStream(1, "s").normal([]).shape == ()
    assert InitStream(1, "s").normal([0, 4]).shape == (0, 4)
    assert InitStream(1, "s").normal([3, 4], box=[slice(2, 2), slice(0, 4)]).shape == (0, 4)


@pytest.mark.parametrize("box", [[slice(0, 3)], [slice(0, 5), slice(0, 4)], [slice(2, 1), slice(0, 4)]])
def test_bad_boxes(box):
    with pytest.raises(ValueError, match="box"):
        InitStream(1, "w").normal([4, 4], box=box)


def test_a_step_is_refused():
    with pytest.raises(ValueError, match="box"):
        InitStream(1, "w").normal([4], box=[slice(0, 4, 2)])
