"""Cross entropy against NumPy in float64; over a cut vocabulary: linear_worker.py."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from paddle.base import core

from ppfleetx.layers.loss import IGNORE_INDEX, ParallelCrossEntropy

S, B, V = 5, 3, 11


def oracle(logits, labels, weights):
    """Losses [s, b], and the gradient [s, b, V] of their sum with these weights."""
    logits = logits.astype("float64")
    peak = logits.max(-1, keepdims=True)
    powers = np.exp(logits - peak)
    total = powers.sum(-1, keepdims=True)
    counts = labels != IGNORE_INDEX
    index = np.where(counts, labels, 0)[..., None]
    losses = (np.log(total) + peak - np.take_along_axis(logits, index, -1))[..., 0] * counts
    gradient = powers / total
    np.put_along_axis(gradient, index, np.take_along_axis(gradient, index, -1) - 1, -1)
    return losses, gradient * (weights * counts)[..., None]


def found(logits, labels, weights, vocab_size=V):
    tensor = paddle.to_tensor(logits, stop_gradient=False)
    losses = ParallelCrossEntropy(vocab_size)(tensor, paddle.to_tensor(labels))
    (losses * paddle.to_tensor(weights)).sum().backward()
    return losses.numpy(), tensor.grad.numpy()


@pytest.fixture
def case():
    random = np.random.default_rng(4)
    labels = random.integers(0, V, [S, B])
    labels[1, 2] = labels[4, 0] = IGNORE_INDEX
    return random.normal(size=[S, B, V]).astype("float32"), labels, random.normal(size=[S, B]).astype("float32")


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("scale", [1.0, 40.0])  # 40: gaps of over 100 between logits
def test_losses_and_gradients_are_those_of_the_formula(case, padding, scale):
    logits, labels, weights = case
    logits *= np.float32(scale)
    padded = np.concatenate([logits, np.full([S, B, padding], 7.0, "float32")], -1)
    losses, gradient = found(padded, labels, weights)
    right = oracle(logits, labels, weights)
    np.testing.assert_allclose(losses, right[0], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(gradient[..., :V], right[1], rtol=1e-5, atol=1e-6)
    assert not gradient[..., V:].any()
    ignored = labels == IGNORE_INDEX
    assert not losses[ignored].any() and not gradient[ignored].any()


@pytest.mark.parametrize("padding", [0, 5])
def test_a_token_with_a_gap_of_100_loses_100(padding):
    """log(1 + 10·e⁻¹⁰⁰) + 100 = 100. Paddle's CPU kernel says 64."""
    logits = np.zeros([1, 1, V + padding], "float32")
    logits[..., :V] = -100.0
    logits[0, 0, 3] = 0.0
    losses, gradient = found(logits, np.array([[7]]), np.ones([1, 1], "float32"))
    assert losses.item() == pytest.approx(100.0, rel=1e-6)
    assert gradient[0, 0, 3] == pytest.approx(1.0) and gradient[0, 0, 7] == pytest.approx(-1.0)


@pytest.mark.parametrize("padding", [0, 5])
def test_padding_far_above_all_tokens_changes_nothing(case, padding):
    logits, labels, weights = case
    right = oracle(logits, labels, weights)
    padded = np.concatenate([logits - 300, np.zeros([S, B, padding], "float32")], -1)
    losses, gradient = found(padded, labels, weights)
    np.testing.assert_allclose(losses, right[0], rtol=1e-4, atol=2e-5)  # 300 leaves float32 digits of 3e-5
    np.testing.assert_allclose(gradient[..., :V], right[1], atol=5e-5)


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("label", [V, V + 2, 10**9, -1, -99])
def test_other_labels_are_refused(case, padding, label):
    """Also those of the padding's columns."""
    logits, labels, weights = case
    labels[2, 1] = label
    padded = np.concatenate([logits, np.zeros([S, B, padding], "float32")], -1)
    with pytest.raises(ValueError, match=rf"labels must lie in 0\.\.10 or be -100, and {label} is there"):
        found(padded, labels, weights)


def test_padding_costs_no_copy_of_the_logits():
    """Forward makes their exponentials, and nothing else of the logits' size: 1.95 where the padding is cut off beforehand."""
    random = np.random.default_rng(0)
    logits = paddle.to_tensor(random.normal(size=[64, 8, 1024]).astype("float32"), stop_gradient=False)
    labels = paddle.zeros([64, 8], "int64")
    before = core.host_memory_stat_current_value("Allocated", 0)
    core.host_memory_stat_reset_peak_value("Allocated", 0)
    losses = ParallelCrossEntropy(1000)(logits, labels)
    peak = core.host_memory_stat_peak_value("Allocated", 0) - before
    assert losses.shape == [64, 8] and peak < 1.1 * logits.size * 4
