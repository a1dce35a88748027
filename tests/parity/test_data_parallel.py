"""Data parallel and micro-batches change nothing but rounding (design: the tolerances of float32 on CPU).

The corpus has document ends, which the loss masks: batches hold different numbers of predicted tokens.
"""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.training import NO_DROPOUT, Outcome, same_weights, train, train_many_on

CONSTANT = ("Optimizer.lr.name=ConstantWithWarmup", "Optimizer.lr.warmup_rate=0", "Optimizer.weight_decay=0")
#: one step so large that the weights are the gradient: w1 = w0 − 10⁴·g
RATE = 1e4
GRADIENT = (
    *NO_DROPOUT,
    *CONSTANT,
    "Engine.max_steps=1",
    "Optimizer.name=SGD",
    f"Optimizer.lr.max_lr={RATE}",
    "Optimizer.grad_clip=null",
)
SGD = (
    *NO_DROPOUT,
    *CONSTANT,
    "Engine.max_steps=20",
    "Optimizer.name=SGD",
    "Optimizer.lr.max_lr=0.3",
    "Optimizer.grad_clip.clip_norm=0.7",
)
ADAMW = (*NO_DROPOUT, "Engine.max_steps=20")
DROPOUT = ("Engine.max_steps=6", "Engine.eval_freq=3", "Engine.eval_iters=2", "Debug.log_sample_ids=true")
#: micro-batches of the five ways to cut 8 samples (C16)
ONE_MICRO = "Global.micro_batch_size=1"


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> dict[str, Outcome]:
    """One process."""
    folder = tmp_path_factory.mktemp("one")
    runs = {"gradient": GRADIENT, "sgd": SGD, "adamw": ADAMW, "dropout": DROPOUT}
    return {name: train(folder / name, *overrides) for name, overrides in runs.items()}


@pytest.fixture(scope="module", params=[2, 4])
def many(request, tmp_path_factory) -> dict[str, Outcome]:
    """The same runs on 2 and on 4 processes, and one of them twice."""
    runs = {"gradient": GRADIENT, "sgd": SGD, "adamw": ADAMW, "dropout": DROPOUT, "again": DROPOUT}
    if request.param == 4:
        runs = {name: (*overrides, ONE_MICRO) for name, overrides in runs.items()}
    outcomes = train_many_on(request.param, runs, tmp_path_factory.mktemp(f"dp{request.param}"))
    launched = outcomes["sgd"].launched
    assert launched.returncode == 0 and launched.orphans == 0, launched.logs[0][-3000:]
    return outcomes


def relative(a, b):
    """Largest |a − b| / max(1, |b|) of two series."""
    a, b = np.array(a), np.array(b)
    return (np.abs(a - b) / np.maximum(1, np.abs(b))).max()


def series(outcome, name):
    return [record[name] for record in outcome.records()]


def test_first_gradient_of_every_parameter(one, many):
    initial = one["gradient"].weights(1)
    parallel = many["gradient"].weights(1)
    assert relative(many["gradient"].losses(), one["gradient"].losses()) <= 1e-6
    for name, weight in initial.items():
        difference = np.linalg.norm((parallel[name] - weight).astype("float64"))
        # the initial weights (norm about 0.02·√n) are lost beside 10⁴·g; a key's bias has gradient 0 but for rounding
        scale = max(np.linalg.norm(weight.astype("float64")), 1e-3 * np.linalg.norm(initial["norm.weight"]))
        assert difference <= 1e-5 * scale, name


@pytest.mark.parametrize(("run", "tolerance"), [("sgd", 1e-5), ("adamw", 1e-4)])
def test_c39_twenty_steps(one, many, run, tolerance):
    assert len(one[run].records()) == 20
    assert relative(many[run].losses(), one[run].losses()) <= tolerance
    assert relative(series(many[run], "grad_norm")[:1], series(one[run], "grad_norm")[:1]) <= 1e-5
    assert relative(series(many[run], "grad_norm"), series(one[run], "grad_norm")) <= 10 * tolerance
    assert one[run].losses()[-1] < 0.9 * one[run].losses()[0]


def test_c38_the_same_run_twice_is_bit_identical(many):
    assert many["dropout"].losses() == many["again"].losses()
    assert same_weights(many["dropout"].weights(6), many["again"].weights(6))


def test_evaluation_is_the_same(one, many):
    """Dropout is off there, but the weights saw other masks: only its first part is comparable to a tolerance."""
    assert [record["batches"] for record in many["dropout"].records("eval")] == [2, 2]
    assert (
        relative(
            [r["loss"] for r in many["dropout"].records("eval")], [r["loss"] for r in one["dropout"].records("eval")]
        )
        < 0.05
    )


def test_c34_ranks_read_disjoint_parts_of_the_same_global_order(many):
    size = len(many["dropout"].launched.logs)
    read: dict[int, list[int]] = {}
    for rank, log in enumerate(many["dropout"].launched.logs):
        found = re.findall(r"\[sample_ids\] step: (\d+), rank: (\d+), ids: \[([\d, ]*)\]", log)
        assert len(found) == 12 and {int(each) for _, each, _ in found} == {rank}  # two runs of 6 steps
        for step, _, ids in found[:6]:
            read.setdefault(int(step), []).extend(int(one) for one in ids.split(", "))
    # ranks in order hold consecutive slices: step k reads samples 8(k−1) … 8k−1
    assert read == {step: list(range(8 * (step - 1), 8 * step)) for step in range(1, 7)}, size


def test_c16_micro_batches_change_only_rounding(tmp_path, many):
    runs = {
        size: train(tmp_path / str(size), *NO_DROPOUT, f"Global.micro_batch_size={size}", "Engine.max_steps=10")
        for size in (8, 4, 2, 1)
    }
    runs["data parallel"] = many["adamw"]
    for name, run in runs.items():
        for what in ("loss", "grad_norm"):
            found, right = np.array(series(run, what)[:10]), np.array(series(runs[8], what))
            assert (np.abs(found - right) / np.abs(right)).max() <= 1e-6, (
                name,
                what,
                (np.abs(found - right) / np.abs(right)).max(),
            )
        assert series(run, "learning_rate")[:10] == series(runs[8], "learning_rate")
