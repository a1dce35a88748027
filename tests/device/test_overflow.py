"""A loss scale that is too large for float16 is counted down, an update at a time, and nothing else is lost by it."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.device.precisions import HALF, SMALL
from tests.device.run import train_many

SCALE = 2**40
STEPS = 30
FLOAT16 = [kind for kind in HALF if kind.startswith("float16")]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    common = (*SMALL, f"Engine.max_steps={STEPS}", "Debug.log_sample_ids=true", "Engine.save_load.save_steps=5")
    runs = {kind: (*common, *HALF[kind], f"Engine.mix_precision.scale_loss={SCALE}") for kind in FLOAT16}
    # its first update has the learning rate 0, so it leaves the weights as they were made
    runs["float32"] = (*SMALL, "Engine.max_steps=1")
    runs["float32 ids"] = (*common, "Engine.save_load.save_steps=-1")
    return train_many(runs, tmp_path_factory.mktemp("overflow"))


def sample_ids(outcome):
    return re.findall(r"\[sample_ids\] step: (\d+), rank: 0, ids: (.*)", outcome.launched.logs[0])


@pytest.mark.parametrize("kind", FLOAT16)
class TestOverflow:
    def test_the_scale_is_halved_until_it_fits(self, outcomes, kind):
        """The largest float16 is 65504 < 2^16, and gradients of up to 2^-2 or so come up on the way: a scale of 2^17 or 2^18
        fits at first, after 22 or 23 halvings."""
        run = outcomes[kind]
        assert run.code == 0, run.launched.logs[0][-3000:]
        records = run.records()
        skipped = [record["found_inf"] for record in records].index(0)
        assert 20 <= skipped <= 25
        assert [record["found_inf"] for record in records[:skipped]] == [1] * skipped
        for number, record in enumerate(records, 1):
            total = sum(earlier["found_inf"] for earlier in records[:number])
            assert record["skipped_steps"] == total and record["loss_scale"] == SCALE / 2**total

    def test_skipped_updates_leave_the_weights(self, outcomes, kind):
        initial = outcomes["float32"].weights(1)
        for step in (5, 20):
            for name, weight in outcomes[kind].weights(step).items():
                assert np.array_equal(weight, initial[name].astype(weight.dtype)), name

    def test_then_it_trains(self, outcomes, kind):
        run = outcomes[kind]
        before, after = run.weights(20), run.weights(STEPS)
        assert all(not np.array_equal(before[name], after[name]) for name in before if ".k.bias" not in name)
        losses = run.losses()
        assert np.mean(losses[-3:]) < np.mean(losses[:20]) - 0.2

    def test_the_order_of_samples_goes_on(self, outcomes, kind):
        ids = sample_ids(outcomes[kind])
        assert len(ids) == STEPS and ids == sample_ids(outcomes["float32 ids"])

    def test_the_learning_rate_waits(self, outcomes, kind):
        """The warm-up begins with the first update that is made: 3 updates to 1e-3, from 0."""
        records = outcomes[kind].records()
        skipped = [record["found_inf"] for record in records].index(0)
        rates = [record["learning_rate"] for record in records]  # of the update after the record's
        assert rates[:skipped] == [0.0] * skipped
        assert rates[skipped : skipped + 3] == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3])
