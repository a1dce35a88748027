"""Layers on 2 real processes (linear_worker.py): the column-parallel linear layer has the numbers of an edge and a plain linear
layer, the loss those of NumPy; and fused kernels, which the device decides on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import paddle
import pytest

from ppfleetx.layers.kernels import has_kernel
from ppfleetx.layers.linear import _fused_linear
from tests.launch import launch

SCENES = (
    "the_numbers_of_edge_and_linear",
    "frozen_parts",
    "communication_runs_beside_dw",
    "only_the_local_part_is_kept",
    "the_loss_over_a_cut_vocabulary",
)


@pytest.fixture(scope="module")
def logs() -> list[str]:
    """What the processes printed; each scene says that it held."""
    result = launch([Path(__file__).with_name("linear_worker.py")], 2)
    assert not result.orphans and not result.timed_out
    return result.logs


@pytest.mark.parametrize("scene", SCENES)
def test_scene_holds_on_both_ranks(logs, scene):
    assert all(f"{scene} held" in log for log in logs), "\n".join(log[-2000:] for log in logs)


def test_fused_kernels_are_not_looked_for_on_a_cpu(monkeypatch):
    """A GPU build of Paddle has `fused_linear`, and nothing of it for `Global.device: cpu`."""
    monkeypatch.setattr(paddle, "is_compiled_with_cuda", lambda: True)
    random = np.random.default_rng(0)
    x, weight, bias = (random.normal(size=shape).astype("float32") for shape in ([4, 3, 5], [5, 7], [7]))
    y = _fused_linear(paddle.to_tensor(x), paddle.to_tensor(weight), paddle.to_tensor(bias))
    np.testing.assert_allclose(y.numpy(), x @ weight + bias, rtol=1e-5, atol=1e-6)
    # registered for CPUs, where it only raises
    assert not has_kernel("fused_softmax_mask_upper_triangle", y)
