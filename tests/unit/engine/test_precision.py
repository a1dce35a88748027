"""The loss scaler of float16: Paddle's rule, and how it meets data parallelism."""

from __future__ import annotations

import pytest

from ppfleetx.config.schema import MixPrecisionConfig
from ppfleetx.engine.precision import LossScaler, Precision


def test_an_overflow_halves_and_2000_good_updates_double():
    scaler = LossScaler(32768.0, 1)
    scaler.update(False)
    scaler.update(False)
    assert scaler.scale == 8192.0
    for _ in range(1999):
        scaler.update(True)
    assert scaler.scale == 8192.0
    scaler.update(True)
    assert scaler.scale == 16384.0
    for _ in range(1999):
        scaler.update(True)
    scaler.update(False)  # begins to count anew
    scaler.update(True)
    assert scaler.scale == 8192.0


@pytest.mark.parametrize("data_degree", [1, 2, 8])
def test_losses_are_divided_by_the_global_tokens_so_the_scale_is_larger_by_the_data_ranks(data_degree):
    """PaddleFleetX scales the mean over one rank's tokens by 32768; the mean over all of D ranks is D times smaller."""
    section = MixPrecisionConfig(enable=True, dtype="float16")
    assert Precision(section, "npu", data_degree).loss_scale() == 32768.0 * data_degree


def test_a_resume_on_another_number_of_data_ranks_scales_for_it():
    before = LossScaler(32768.0, 8)
    before.update(True)
    before.update(False)
    before.update(True)
    after = LossScaler(1.0, 2)
    after.load_state_dict(before.state_dict())
    assert before.scale == 131072.0 and after.scale == 32768.0 and after.state_dict() == before.state_dict()


@pytest.mark.parametrize(("dtype", "device"), [("bfloat16", "npu"), ("float16", "cpu")])
def test_others_scale_nothing(dtype, device):
    precision = Precision(MixPrecisionConfig(enable=True, dtype=dtype), device, 4)
    assert precision.loss_scale() == 1.0 and precision.state_dict() == {}
    precision.load_state_dict({"scale_per_data_rank": 8.0, "good_steps": 3})  # of a float16 run
    assert precision.loss_scale() == 1.0
