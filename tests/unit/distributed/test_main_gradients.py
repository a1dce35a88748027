"""Float32 main gradients of half-precision parameters. A CPU casts and adds in bfloat16, though it cannot multiply."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from paddle import nn

from ppfleetx.distributed import ParallelContext, Topology
from ppfleetx.distributed.trainable import FLOAT32, Dtypes, WholeParameters
from ppfleetx.layers.spec import ParameterSpec

HALF = Dtypes("bfloat16", "float32", main_gradients=True)
RATE, FACTOR = 0.5, 0.25


def rounded(array) -> np.ndarray:
    """To bfloat16 and back."""
    return paddle.to_tensor(np.asarray(array, np.float32)).astype("bfloat16").astype("float32").numpy()


def parameters(dtypes=HALF, frozen=False):
    """A linear layer's parameters (odd sizes), and what the optimizer updates for them."""
    paddle.seed(3)
    layer = nn.Linear(7, 3)
    layer.bias.stop_gradient = frozen
    for name, parameter in layer.named_parameters():
        parameter.spec = ParameterSpec(name=name, shape=tuple(parameter.shape))
    context = ParallelContext.create(Topology(0, 1), "cpu")
    return layer, WholeParameters(context, dict(layer.named_parameters()), dtypes=dtypes)


def backward(parameter, gradient) -> None:
    """A backward pass that gives `parameter` this gradient, rounded to the parameter's type."""
    (parameter.astype("float32") * paddle.to_tensor(np.asarray(gradient, np.float32))).sum().backward()


def test_small_gradients_are_not_lost():
    """1 + 256 · 2⁻⁹ = 1.5. Next to 1 bfloat16 has steps of 2⁻⁷, so that 1 + 2⁻⁹ is 1 in it, 256 times over."""
    half = {"with": parameters(), "without": parameters(FLOAT32)}
    half["without"][0].to(dtype="bfloat16")
    found = {}
    for name, (layer, trainable) in half.items():
        for value in [1.0, *[2.0**-9] * 256]:
            backward(layer.weight, np.full([7, 3], value))
        trainable.reduce()
        found[name] = trainable.named["weight"].grad
    assert found["with"].dtype == paddle.float32 and (found["with"].numpy() == 1.5).all()
    assert found["without"].dtype == paddle.bfloat16 and (found["without"].astype("float32").numpy() == 1.0).all()


def test_sum_norm_scale_and_update_against_float64():
    layer, trainable = parameters()
    start = trainable.named["weight"].numpy()
    optimizer = paddle.optimizer.SGD(RATE, parameters=list(trainable.named.values()), multi_precision=True)
    random = np.random.default_rng(0)
    for _ in range(3):  # updates; a second one must not see the first one's gradients
        gradients = rounded(random.normal(size=[40, 7, 3]) * 10.0 ** random.uniform(-4, 2, [40, 1, 1]))
        for gradient in gradients:
            backward(layer.weight, gradient)
            assert layer.weight.grad is None
        right = gradients.astype("float64").sum(0)
        trainable.reduce()
        np.testing.assert_allclose(trainable.named["weight"].grad.numpy(), right, rtol=1e-5, atol=1e-4)
        assert float(trainable.norm()) == pytest.approx(np.linalg.norm(right), rel=1e-6)
        trainable.scale(FACTOR)
        optimizer.step()
        trainable.after_update()
        expected = start - RATE * FACTOR * right
        start = trainable.named["weight"].numpy()
        np.testing.assert_allclose(start, expected, rtol=1e-5, atol=1e-4)
        assert layer.weight.dtype == paddle.bfloat16
        assert np.array_equal(layer.weight.astype("float32").numpy(), rounded(start))
        assert trainable.named["weight"].grad is None


def test_masters_have_the_unrounded_initial_values_and_loaded_ones_reach_the_model():
    right = parameters(FLOAT32)[0]
    layer, trainable = parameters()
    for piece in trainable.pieces():
        assert piece.tensor.dtype == paddle.float32
        assert np.array_equal(piece.tensor.numpy(), getattr(right, piece.name).numpy())
        piece.tensor.set_value(piece.tensor.numpy() * 3)
    trainable.after_load()
    assert np.array_equal(layer.weight.astype("float32").numpy(), rounded(right.weight.numpy() * np.float32(3)))


def test_frozen_and_unused_parameters_have_no_gradient():
    layer, trainable = parameters(frozen=True)
    trainable.reduce()
    assert float(trainable.norm()) == 0.0
    assert trainable.named["weight"].grad is None and trainable.named["bias"].stop_gradient
    backward(layer.weight, np.ones([7, 3]))
    trainable.reduce()
    assert float(trainable.norm()) == pytest.approx(21**0.5)
    assert trainable.named["bias"].grad is None
