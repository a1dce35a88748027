"""Between runs in half and in full precision the float32 values go on; the same precision is carried to the bit."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from ppfleetx.checkpoint.reader import Checkpoint
from ppfleetx.checkpoint.snapshot import Snapshots, TrainingState
from ppfleetx.checkpoint.writer import write_manifest, write_own
from ppfleetx.config import load_config
from ppfleetx.distributed.trainable import Piece
from ppfleetx.engine.resume import read_optimizer, read_weights
from ppfleetx.layers.spec import ParameterSpec
from tests.training import REPO, TINY

EXACT = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
CONFIG = load_config([str(REPO / TINY)], [], 1).config


def piece_of(tensor):
    tensor.spec = ParameterSpec(name="a.weight", shape=(3, 4))
    return Piece("a.weight", tensor, ((0, 3), (0, 4)), None, True)


@pytest.fixture
def restored(tmp_path):
    """(dtype, slots in the checkpoint) → (weight, what is restored of the optimizer) of a parameter of this type."""

    def restore(dtype, slots):
        weight = slots.pop("")
        state = TrainingState([piece_of(weight)], {f"a.weight.{slot}": value for slot, value in slots.items()}, {}, {})
        snapshot = Snapshots().take(state)
        write_own(tmp_path, 0, snapshot)
        write_manifest(tmp_path, 1, snapshot)
        saved, piece = Checkpoint(tmp_path), piece_of(paddle.zeros([3, 4], dtype))
        optimizer = read_optimizer(CONFIG, [piece], saved, frozenset({"moment1"}))
        read_weights([piece], saved)
        assert piece.tensor.dtype == getattr(paddle, dtype)
        return piece.tensor, {key.removeprefix("a.weight."): value for key, value in optimizer.items()}

    return restore


def exact():
    return paddle.to_tensor(EXACT)


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
class TestHalf:
    def test_a_full_run_goes_on_from_the_masters_of_a_half_one(self, restored, half):
        weight, left = restored("float32", {"": exact().astype(half), "master": exact(), "moment1": exact()})
        assert np.array_equal(weight.numpy(), EXACT) and left.keys() == {"moment1"}

    def test_a_half_run_takes_full_weights_as_its_masters(self, restored, half):
        weight, left = restored(half, {"": exact()})
        assert np.array_equal(weight.numpy(), exact().astype(half).numpy())
        assert np.array_equal(left["master"].numpy(), EXACT)

    def test_a_half_run_from_its_own_kind(self, restored, half):
        """To the bit, even where weight and master differ."""
        weight, left = restored(half, {"": (exact() * 2).astype(half), "master": exact()})
        assert np.array_equal(weight.numpy(), (exact() * 2).astype(half).numpy())
        assert np.array_equal(left["master"].numpy(), EXACT)

    def test_the_other_half_from_the_masters(self, restored, half):
        other = {"bfloat16": "float16", "float16": "bfloat16"}[half]
        weight, left = restored(other, {"": exact().astype(half), "master": exact()})
        assert np.array_equal(weight.numpy(), exact().astype(other).numpy()) and left.keys() == {"master"}

    def test_without_masters(self, restored, half):
        weight, left = restored("float32", {"": exact().astype(half)})
        assert np.array_equal(weight.numpy(), exact().astype(half).astype("float32").numpy()) and not left
