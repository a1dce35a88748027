"""`Global.device` against the Paddle build (case C102, rule B37)."""

from __future__ import annotations

import paddle
import pytest

from ppfleetx.config.errors import UserError
from ppfleetx.distributed import check_device
from ppfleetx.distributed.device import DEVICE_KINDS, set_device


def refused(device):
    with pytest.raises(UserError) as caught:
        check_device(device)
    (problem,) = caught.value.problems
    assert (problem.key, problem.value, problem.fix) == ("Global.device", device, "-o Global.device=cpu")
    return problem.rule


def test_cpu():
    check_device("cpu")
    assert set_device("cpu") == "cpu" == paddle.get_device()


@pytest.mark.skipif(paddle.is_compiled_with_cuda(), reason="needs a CPU build")
def test_gpu_on_a_cpu_build_c102():
    rule = "this Paddle build has no GPU support (paddle.is_compiled_with_cuda() is False)"
    assert refused("gpu") == rule
    for device in set(DEVICE_KINDS) - {"cpu"}:
        assert device in refused(device).lower()


@pytest.mark.parametrize("device", ["tpu", "GPU", "gpu:0", "", None])
def test_unknown_kinds_are_listed_c102(device):
    rule = refused(device)
    for kind in DEVICE_KINDS:
        assert kind in rule


def test_a_build_without_a_visible_gpu(monkeypatch):
    monkeypatch.setattr(paddle, "is_compiled_with_cuda", lambda: True)
    monkeypatch.setattr(paddle.device.cuda, "device_count", lambda: 0)
    assert "visible" in refused("gpu")


def test_the_launchers_device_is_taken(monkeypatch):
    chosen = []
    monkeypatch.setattr(paddle, "set_device", chosen.append)
    monkeypatch.setenv("FLAGS_selected_gpus", "3,4")
    assert [set_device("gpu"), set_device("rocm"), set_device("xpu")] == ["gpu:3", "gpu:3", "xpu:0"] == chosen
