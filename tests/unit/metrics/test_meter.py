"""Throughput and window means against hand-computed values (case C87, rules B28 and B29)."""

import pytest

from ppfleetx.metrics import EvalRecord, Meter, StepRecord, TrainRecord, peak_flops, peak_memory_bytes
from ppfleetx.metrics.meter import Sums


class Clock:
    """A clock that only moves when told."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def run(meter, clock, losses, step_s=0.5, **kwargs):
    for loss in losses:
        clock.now += step_s
        meter.update(StepRecord(loss=loss, **kwargs))
    window = meter.window()
    meter.start()
    return window


def test_c87_total_and_per_device():
    clock = Clock()
    meter = Meter(tokens_per_update=8 * 32, world_size=4, clock=clock)  # mp2 · dp2
    window = run(meter, clock, [3.0, 1.0])
    assert window.avg_batch_cost_s == 0.5
    assert window.tokens_per_second == 512
    assert window.tokens_per_second_per_device == 128
    assert (window.loss, window.grad_norm, window.found_inf, window.mfu) == (2.0, None, 0, None)
    line = TrainRecord(step=2, epoch=0, learning_rate=1e-3, **vars(window)).line()
    assert "ips_total: 512 tokens/s, ips: 128 tokens/s/device" in line  # the label says which


def test_windows_do_not_overlap_and_pauses_do_not_count():
    clock = Clock()
    meter = Meter(10, 1, clock=clock)
    run(meter, clock, [9.0])
    with meter.pause():
        clock.now += 1000
    with pytest.raises(KeyError), meter.pause():
        clock.now += 1000
        raise KeyError
    window = run(meter, clock, [1.0, 2.0], step_s=0.25)
    assert window.loss == 1.5 and window.avg_batch_cost_s == 0.25 and window.tokens_per_second == 40


def test_mfu():
    clock = Clock()
    meter = Meter(256, 4, flops_per_token=1e9, peak_flops=1e12, clock=clock)
    assert run(meter, clock, [1.0]).mfu == pytest.approx(128 * 1e9 / 1e12)


def test_skipped_updates_do_not_spoil_the_mean_norm():
    clock = Clock()
    meter = Meter(1, 1, clock=clock)
    for norm, skipped in ((2.0, False), (float("inf"), True), (4.0, False)):
        meter.update(StepRecord(1.0, norm, skipped))
    window = meter.window()
    assert window.grad_norm == 3.0 and window.found_inf == 1


def test_tensors_count_as_numbers():
    paddle = pytest.importorskip("paddle")
    meter = Meter(1, 1)
    meter.update(StepRecord(paddle.to_tensor(1.5), paddle.to_tensor(0.25)))
    window = meter.window()
    assert window.loss == 1.5 and window.grad_norm == 0.25 and type(window.loss) is float


def test_a_clock_that_stands_still():
    meter = Meter(1, 1, clock=lambda: 0.0)
    meter.update(StepRecord(1.0))
    assert meter.window().avg_batch_cost_s > 0


@pytest.mark.parametrize(
    ("name", "half", "peak"),
    [
        ("NVIDIA H200", True, 989e12), ("NVIDIA A100-SXM4-80GB", True, 312e12), ("NVIDIA A10", True, 125e12),
        ("NVIDIA H100 80GB HBM3", True, 989e12), ("NVIDIA H100 PCIe", True, 756e12), ("NVIDIA H100 NVL", True, 835e12),
        ("NVIDIA A100-SXM4-80GB", False, None), ("NVIDIA RTX A1000", True, None), ("cpu", True, None),
    ],
)  # fmt: skip
def test_peak_flops(name, half, peak):
    assert peak_flops(name, half) == peak


def test_train_line_is_paddlefleetx_s_with_more_after_it():
    record = TrainRecord(
        step=10, epoch=0, updates=1, loss=5.545177, grad_norm=1.23456789, found_inf=0, avg_batch_cost_s=0.123452,
        tokens_per_second=2074.1, tokens_per_second_per_device=1037.05, mfu=None, learning_rate=5e-4,
        memory_bytes=123_400_000,
    )  # fmt: skip
    assert record.line() == (
        "[train] epoch: 0, batch: 9, loss: 5.545177000, avg_batch_cost: 0.12345 sec, speed: 8.10 step/s, "
        "ips_total: 2074 tokens/s, ips: 1037 tokens/s/device, learning rate: 5.00000e-04, grad_norm: 1.234567890, "
        "loss_scale: 1.0, found_inf: 0, mfu: -, mem: 123.4 MB"
    )


def test_eval_line():
    record = EvalRecord(step=10, loss=5.545177, batches=4, avg_batch_cost_s=0.5)
    assert record.line() == (
        "[eval] step: 10, loss: 5.545177000, ppl: 256.000, batches: 4, avg_batch_cost: 0.50000 sec"
    )
    assert EvalRecord(step=1, loss=1e4, batches=1, avg_batch_cost_s=1).ppl == float("inf")


def test_peak_memory_grows_with_a_tensor():
    paddle = pytest.importorskip("paddle")
    before = peak_memory_bytes("cpu")
    big = paddle.zeros([before // 4 + 1_000_000])
    assert peak_memory_bytes("cpu") >= before + 4_000_000
    del big
    assert peak_memory_bytes("cpu") >= before + 4_000_000
    assert peak_memory_bytes("xpu") is None


def test_a_window_goes_on_where_another_process_left_it():
    """Means over all five updates, speed over the two that this meter timed."""
    clock = Clock()
    first = Meter(10, 1, clock=clock)
    for loss, norm, skipped in ((1.0, 2.0, False), (2.0, float("inf"), True), (3.0, 4.0, False)):
        clock.now += 7
        first.update(StepRecord(loss, norm, skipped))
    second = Meter(10, 1, sums=Sums(**vars(first.sums)), clock=clock)
    assert second.window() is None  # nothing new to tell
    for loss, norm in ((4.0, 6.0), (5.0, 8.0)):
        clock.now += 0.5
        second.update(StepRecord(loss, norm))
    window = second.window()
    assert (window.updates, window.loss, window.grad_norm, window.found_inf) == (5, 15 / 5, 20 / 4, 1)
    assert (window.avg_batch_cost_s, window.tokens_per_second) == (0.5, 20)
