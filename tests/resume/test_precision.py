"""What half-precision runs of earlier versions stored, weights in half beside float32 masters, goes on in float32, whatever the
precision. (Whole runs in half precision: tests/device.)"""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from ppfleetx.checkpoint.reader import Checkpoint
from ppfleetx.checkpoint.snapshot import Snapshots, TrainingState
from ppfleetx.checkpoint.writer import write_manifest, write_own
from ppfleetx.distributed.trainable import Piece
from ppfleetx.engine.resume import read_optimizer, read_weights
from ppfleetx.layers.spec import ParameterSpec

EXACT = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)


def piece_of(tensor):
    tensor.spec = ParameterSpec(name="a.weight", shape=(3, 4))
    tensor.stop_gradient = False
    return Piece("a.weight", tensor, ((0, 3), (0, 4)), None, True)


@pytest.fixture
def restored(tmp_path):
    """Slots in the checkpoint → (weight, what is restored of the optimizer)."""

    def restore(slots):
        weight = slots.pop("")
        state = TrainingState([piece_of(weight)], {f"a.weight.{slot}": value for slot, value in slots.items()}, {}, {})
        snapshot = Snapshots().take(state)
        write_own(tmp_path, 0, snapshot)
        write_manifest(tmp_path, 1, snapshot)
        saved, piece = Checkpoint(tmp_path), piece_of(paddle.zeros([3, 4]))
        optimizer = read_optimizer([piece], saved, frozenset({"moment1"}))
        with paddle.no_grad():
            read_weights([piece], saved)
        return piece.tensor.numpy(), {key.removeprefix("a.weight."): value.numpy() for key, value in optimizer.items()}

    return restore


def exact():
    return paddle.to_tensor(EXACT)


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
class TestHalf:
    def test_masters_go_on(self, restored, half):
        """Also where weight and master differ by more than rounding."""
        weight, left = restored({"": (exact() * 2).astype(half), "master": exact(), "moment1": exact() * 3})
        assert np.array_equal(weight, EXACT)
        assert left.keys() == {"moment1"} and np.array_equal(left["moment1"], EXACT * 3)

    def test_without_masters(self, restored, half):
        weight, left = restored({"": exact().astype(half)})
        assert np.array_equal(weight, exact().astype(half).astype("float32").numpy()) and not left


def test_float32_is_carried_to_the_bit(restored):
    weight, left = restored({"": exact(), "moment1": exact() / 3})
    assert np.array_equal(weight, EXACT) and np.array_equal(left["moment1"], (exact() / 3).numpy())
