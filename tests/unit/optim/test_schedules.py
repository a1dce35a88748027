"""Learning-rate schedules against hand-computed values (rule B24; cases C64, C66)."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppfleetx.config.schema import LRConfig
from ppfleetx.optim.schedules import SHAPES, build_schedule

TINY = LRConfig(max_lr=1e-3, min_lr=1e-4, warmup_rate=0.1, decay_steps=20)


def test_c64_tiny_cosine():
    schedule = build_schedule(TINY, num_updates=7)  # decay_steps is given, so the 7 do not count
    right = {
        0: 0, 1: 5e-4, 2: 1e-3, 3: 9.931635e-4, 4: 9.728617e-4, 5: 9.397114e-4, 11: 5.5e-4, 20: 1e-4,
        21: 1e-4, 1000: 1e-4,
    }  # fmt: skip
    assert {k: schedule(k) for k in right} == pytest.approx(right, rel=1e-6)
    assert schedule(2) == 1e-3 and schedule(20) == 1e-4


def test_b24_base_config_whatever_the_batch_size():
    # a schedule counts updates: the rule's samples (8 an update, or any number) cancel out
    schedule = build_schedule(LRConfig(max_lr=5e-5, min_lr=1e-5, warmup_rate=0.01, decay_steps=360000), 500000)
    right = {1: 1.388889e-08, 10: 1.388889e-07, 3600: 5e-5, 181800: 3e-5, 360000: 1e-5}
    assert {k: schedule(k) for k in right} == pytest.approx(right, rel=1e-6)


def test_decay_steps_is_the_run_where_it_is_null():
    assert build_schedule(LRConfig(decay_steps=None), 300) == build_schedule(LRConfig(decay_steps=300), 1)


def test_a_warm_up_need_not_be_whole_updates():
    schedule = build_schedule(LRConfig(max_lr=1.0, min_lr=0.0, warmup_rate=0.25, decay_steps=10), 1)  # 2.5 updates
    assert [schedule(k) for k in range(3)] == pytest.approx([0, 0.4, 0.8])
    assert schedule(3) == pytest.approx(0.5 * (math.cos(math.pi * 0.5 / 7.5) + 1))


@pytest.mark.parametrize("name", SHAPES)
def test_no_warm_up_starts_at_max_lr(name):
    schedule = build_schedule(LRConfig(name=name, max_lr=3e-4, min_lr=1e-5, warmup_rate=0.0, decay_steps=4), 1)
    assert schedule(0) == 3e-4


def test_linear():
    schedule = build_schedule(
        LRConfig(name="LinearDecayWithWarmup", max_lr=1.0, min_lr=0.2, warmup_rate=0.2, decay_steps=10), 1
    )
    assert [schedule(k) for k in (0, 1, 2, 4, 6, 10, 11)] == pytest.approx([0, 0.5, 1, 0.8, 0.6, 0.2, 0.2])


def test_constant():
    schedule = build_schedule(
        LRConfig(name="ConstantWithWarmup", max_lr=1e-3, min_lr=1e-5, warmup_rate=0.2, decay_steps=10), 1
    )
    assert [schedule(k) for k in (0, 1, 2, 10, 1000)] == [0, 5e-4, 1e-3, 1e-3, 1e-3]


def test_warmup_stable_decay():
    schedule = build_schedule(
        LRConfig(name="WarmupStableDecay", max_lr=1.0, min_lr=0.2, warmup_rate=0.2, decay_steps=10, decay_rate=0.4), 1
    )
    assert [schedule(k) for k in (0, 1, 2, 5, 6, 7, 8, 9, 10, 11)] == pytest.approx(
        [0, 0.5, 1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2]
    )


def test_c66_a_resume_needs_nothing_but_the_number_of_updates():
    straight = [build_schedule(TINY, 10)(k) for k in range(10)]
    resumed = build_schedule(TINY, 10)
    assert [resumed(k) for k in range(5, 10)] == straight[5:]


@given(
    name=st.sampled_from(sorted(SHAPES)),
    max_lr=st.floats(1e-6, 1.0),
    low=st.floats(0, 1),
    warmup_rate=st.floats(0, 0.6),
    decay_rate=st.floats(0.01, 0.4),
    decay_steps=st.integers(1, 1000),
)
def test_rises_then_never_rises_again_within_bounds(name, max_lr, low, warmup_rate, decay_rate, decay_steps):
    lr = LRConfig(
        name=name,
        max_lr=max_lr,
        min_lr=low * max_lr,
        warmup_rate=warmup_rate,
        decay_rate=decay_rate,
        decay_steps=decay_steps,
    )
    schedule = build_schedule(lr, 1)
    rates = [schedule(k) for k in range(0, decay_steps + 3)]
    slack = 1e-12 * max_lr
    assert all(0 <= rate <= max_lr + slack for rate in rates)
    assert all(rate >= lr.min_lr - slack for k, rate in enumerate(rates) if k >= schedule.warmup_updates)
    for k in range(len(rates) - 1):
        if k + 1 <= schedule.warmup_updates:
            assert rates[k] <= rates[k + 1] + slack
        elif k >= schedule.warmup_updates:
            assert rates[k] >= rates[k + 1] - slack
    assert rates[-1] == (max_lr if name == "ConstantWithWarmup" else pytest.approx(lr.min_lr, abs=slack))
