"""The counters of a checkpoint: there and back, and from other versions."""

from __future__ import annotations

import json
import math

import pytest

from ppfleetx.engine.progress import Progress, progress_of
from ppfleetx.metrics.meter import Sums

FULL = Progress(9, 72, 1, 1, 1, Sums(4, 22.5, 1, 3, 7.25))


def test_there_and_back():
    state = json.loads(json.dumps(FULL.state_dict()))
    assert progress_of(state) == (FULL, [], [])


def test_sums_that_are_not_finite():
    """JSON has no such numbers; a mean over them is null in metrics.jsonl either way."""
    for value in (math.inf, math.nan):
        state = json.loads(json.dumps(Progress(1, 8, window=Sums(1, value)).state_dict(), allow_nan=False))
        assert math.isnan(progress_of(state).progress.window.loss)


def test_other_versions():
    older = {"step": 9, "consumed_samples": 72, "skipped_steps": 1, "skipped_in_row": 1}
    progress, unknown, lacking = progress_of(older)
    assert progress == Progress(9, 72, 1, 1, 0, Sums()) and (unknown, lacking) == ([], ["evaluation_due", "window"])
    newer = FULL.state_dict() | {"next_thing": "text"}
    newer["window"]["next_sum"] = 2.0
    assert progress_of(newer) == (FULL, ["next_thing"], [])


@pytest.mark.parametrize("name", ["step", "consumed_samples"])
def test_without_these_nobody_knows_where_the_run_stands(name):
    state = FULL.state_dict()
    del state[name]
    with pytest.raises(ValueError, match="its progress is"):
        progress_of(state)


@pytest.mark.parametrize(
    "wrong",
    [{"step": -1}, {"step": 1.0}, {"step": True}, {"step": None}, {"skipped_steps": 2**62}, {"window": []},
     {"window": {"updates": 0.5}}, {"window": {"loss": "1"}}, {"window": {"grad_norm": [1]}}, {"window": None}],
)  # fmt: skip
def test_what_is_no_number_that_can_be(wrong):
    with pytest.raises(ValueError, match="its "):
        progress_of(FULL.state_dict() | wrong)
