"""`diff`: what differs, by how much, and where first."""

from __future__ import annotations

import numpy as np
import pytest

from ppfleetx.checkpoint import compare as module
from ppfleetx.checkpoint.compare import compare
from ppfleetx.checkpoint.inspect import statistics
from ppfleetx.checkpoint.reader import Checkpoint
from tests.unit.checkpoint.written import bfloat16, random_arrays, write_checkpoint

A = random_arrays(("a", (5, 4), "float32"), ("b", (6,), "float32"), ("b:moment1", (6,), "float32"))


def both(folder, a, b, **options):
    """Differences of two checkpoints, cut in different ways."""
    return compare(write_checkpoint(folder / "A", a, 2, 1), write_checkpoint(folder / "B", b, 3, 0), **options)


def test_the_same_state_in_other_parts_is_equal(tmp_path):
    found = both(tmp_path, A, dict(reversed(A.items())))
    assert (found.tensors, found.settings, found.num_equal) == ([], [], 3)


@pytest.mark.parametrize("piece_bytes", [64, 1 << 20])
def test_numbers_worked_out_by_hand(tmp_path, monkeypatch, piece_bytes):
    """a: 2.0 → 2.5 at [1, 2] and −8 → −4 at [3, 0]: largest difference 4; relative 0.5/2.5 = 0.2 and 4/8 = 0.5."""
    monkeypatch.setattr(module, "PIECE_BYTES", piece_bytes)
    old, new = np.ones((5, 4), np.float32), np.ones((5, 4), np.float32)
    old[1, 2], new[1, 2], old[3, 0], new[3, 0] = 2.0, 2.5, -8, -4
    found = both(tmp_path, {**A, "a": old}, {**A, "a": new})
    assert found.num_equal == 2
    assert found.tensors == ["a: 2 of 20 values differ, the first at [1, 2]; largest difference 4, relative 0.5"]


def test_missing_shapes_and_types(tmp_path):
    """A tensor of another type is said to differ even where its values are equal."""
    halves = np.array([0.5, 1.5, -2.0, 3.0, 0.0, 1.0], np.float32)
    a = {"a": A["a"], "b": halves, "only": A["b"]}
    b = {"a": A["a"].reshape(4, 5), "b": bfloat16(halves), "other:moment1": A["b"]}
    assert both(tmp_path, a, b).tensors == [
        "a: shape [5, 4] in A, [4, 5] in B",
        "b: equal values; F32 in A, BF16 in B",
        "only: only in A, F32 [6]",
        "other.moment1: only in B, F32 [6]",
    ]


def test_weights_alone(tmp_path):
    found = both(tmp_path, A, {**A, "b:moment1": A["b"]}, weights_only=True)
    assert (found.tensors, found.num_equal) == ([], 2)


def test_what_is_no_number(tmp_path):
    old = np.array([np.nan, 1, 0.0, np.inf, np.nan], np.float32)
    new = np.array([np.nan, np.nan, -0.0, np.inf, np.nan], np.float32)
    (line,) = both(tmp_path, {"a": old}, {"a": new}).tensors
    assert line == "a: 2 of 5 values differ, the first at [1]; largest difference inf, relative inf"


@pytest.mark.filterwarnings("error")
def test_what_leaves_the_numbers_is_told_without_a_warning(tmp_path):
    """A run that diverged beside one that did not: infinite beside finite, and 1e308 − (−1e308), which float64 cannot hold."""
    old = {"a": np.array([1, np.inf], np.float32), "b": np.array([1e308]), "c": np.array([np.nan], np.float32)}
    new = {"a": np.array([1, 2], np.float32), "b": np.array([-1e308])}
    new["c"] = np.array([0x7FC00001], np.uint32).view(np.float32)  # none either, in other bits
    assert both(tmp_path, old, new).tensors == [
        "a: 1 of 2 values differ, the first at [1]; largest difference inf, relative inf",
        "b: 1 of 1 values differ, the first at [0]; largest difference inf, relative inf",
        "c: 1 of 1 values differ, the first at [0]; largest difference 0, relative 0",
    ]
    assert "  least -1e+308, most -1e+308" in statistics(Checkpoint(tmp_path / "B"), "b")


def test_settings(tmp_path):
    runs = [{"config": {"Model": {"hidden_size": size, "x": 1}, "_derived": {"y": size}}} for size in (8, 16)]
    a, b = (
        write_checkpoint(tmp_path / f"{number}", A, run=run, progress={"step": number})
        for number, run in enumerate(runs)
    )
    assert compare(a, b).settings == ["config.Model.hidden_size: 8 in A, 16 in B", "progress.step: 0 in A, 1 in B"]
    assert compare(a, b).tensors == []
