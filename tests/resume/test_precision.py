"""Between runs in half and in full precision the float32 values go on; the same precision is carried to the bit."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from ppfleetx.distributed.trainable import Piece
from ppfleetx.engine.resume import _restore_weight
from ppfleetx.layers.spec import ParameterSpec

EXACT = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)


def restored(dtype, slots):
    """(weight, what is left for the optimizer) of a parameter of this type."""
    tensor = paddle.zeros([3, 4], dtype)
    tensor.spec = ParameterSpec(name="a.weight", shape=(3, 4))
    left = _restore_weight(Piece("a.weight", tensor, ((0, 3), (0, 4)), None, True), slots)
    assert tensor.dtype == getattr(paddle, dtype)
    return tensor, left


def exact():
    return paddle.to_tensor(EXACT)


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
class TestHalf:
    def test_a_full_run_goes_on_from_the_masters_of_a_half_one(self, half):
        weight, left = restored("float32", {"": exact().astype(half), "master": exact(), "moment1": exact()})
        assert np.array_equal(weight.numpy(), EXACT) and left.keys() == {"moment1"}

    def test_a_half_run_takes_full_weights_as_its_masters(self, half):
        weight, left = restored(half, {"": exact()})
        assert np.array_equal(weight.numpy(), exact().astype(half).numpy())
        assert np.array_equal(left["master"].numpy(), EXACT)

    def test_a_half_run_from_its_own_kind(self, half):
        """To the bit, even where weight and master differ."""
        weight, left = restored(half, {"": (exact() * 2).astype(half), "master": exact()})
        assert np.array_equal(weight.numpy(), (exact() * 2).astype(half).numpy())
        assert np.array_equal(left["master"].numpy(), EXACT)

    def test_the_other_half_from_the_masters(self, half):
        other = {"bfloat16": "float16", "float16": "bfloat16"}[half]
        weight, left = restored(other, {"": exact().astype(half), "master": exact()})
        assert np.array_equal(weight.numpy(), exact().astype(other).numpy()) and left.keys() == {"master"}

    def test_without_masters(self, half):
        weight, left = restored("float32", {"": exact().astype(half)})
        assert np.array_equal(weight.numpy(), exact().astype(half).astype("float32").numpy()) and not left
