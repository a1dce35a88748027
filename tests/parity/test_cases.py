"""Cases of pipeline, tensor and sequence parallelism that users met elsewhere."""

from __future__ import annotations

import re

import numpy as np
import pytest

from ppfleetx.config.layouts import parse_layout
from tests.training import NO_DROPOUT, REPO, train, train_many_on

SMALL = (
    *NO_DROPOUT,
    "Model.num_layers=4",
    "Model.hidden_size=32",
    "Engine.max_steps=3",
    "Data.Train.loader.num_workers=0",
)
#: odd sizes: 33 places, which neither 2 nor 4 divides
ODD = ("Data.Train.dataset.max_seq_len=33", "Data.Eval.dataset.max_seq_len=33", "Model.max_position_embeddings=33")
EVAL = ("Engine.eval_freq=2", "Engine.eval_iters=2")
RUNS = {
    "c18": ("Global.micro_batch_size=8",),  # one micro-batch, fewer than stages
    "c47": (*ODD, "Global.micro_batch_size=1"),
    "c48": (*EVAL, "Global.micro_batch_size=2", "Data.Eval.dataset.max_seq_len=24"),  # other sequences than in training
}


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    return {name: train(folder / name, *SMALL, *overrides) for name, overrides in RUNS.items()}


@pytest.mark.parametrize(
    ("nproc", "cases"),
    [
        (2, {"pp2": ("c18", "c48"), "mp2": ("c48",), "sep2": ("c48",)}),
        (4, {"pp4": ("c18",), "mp2pp2": ("c47", "c48", "c18")}),
    ],
)
def test_c18_c47_c48_losses_norms_and_evaluations(tmp_path, one, nproc, cases):
    runs = {
        f"{layout}-{case}": (*SMALL, *RUNS[case], *parse_layout(layout).overrides)
        for layout, names in cases.items()
        for case in names
    }
    for name, outcome in train_many_on(nproc, runs, tmp_path).items():
        assert outcome.code == 0, outcome.launched.logs[0][-2000:]
        right = one[name.partition("-")[2]]
        for key in ("loss", "grad_norm"):
            found, expected = ([record[key] for record in run.records()] for run in (outcome, right))
            assert found == pytest.approx(expected, rel=1e-5), name
        evaluations = [[record["loss"] for record in run.records("eval")] for run in (outcome, right)]
        assert evaluations[0] == pytest.approx(evaluations[1], rel=1e-5), name
        assert len(evaluations[0]) == ("c48" in name)


def test_c45_c55_copies_stay_bit_equal(tmp_path):
    """The tied embedding on the first and the last stage, and under sequence parallel every parameter that mp does not cut."""
    common = ("Model.num_layers=4", "Model.hidden_size=32", "Engine.max_steps=3", "Global.micro_batch_size=2")
    runs = {layout: (*common, *parse_layout(layout).overrides) for layout in ("mp2pp2sp", "dp2pp2", "mp2pp2")}
    outcomes = train_many_on(4, runs, tmp_path, worker=REPO / "tests/parity/copies_worker.py")
    launched = next(iter(outcomes.values())).launched
    assert launched.returncode == 0, "\n".join(log[-1500:] for log in launched.logs)
    for log in launched.logs:
        counted = re.search(r'COUNTED \{"mp": (\d+), "tied": (\d+)\}', log)
        # a stage holds two blocks with 6 whole parameters each and the position embedding or the last norm; 2 runs of 3 steps
        assert int(counted[1]) >= 2 * 3 * 13 and int(counted[2]) == 3 * 3
    assert all(np.isfinite(outcome.losses()).all() for outcome in outcomes.values())
