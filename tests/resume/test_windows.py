"""Log lines over several updates: no update is missing, and a window is the same wherever a run was stopped and resumed."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from ppfleetx.engine.step import NotFinite, TrainStep
from tests.training import Outcome, train

RUN = ("Model.num_layers=1", "Engine.max_steps=10")
FIVE, AUTO = "Engine.logging_freq=5", "Engine.save_load.ckpt_dir=auto"


@pytest.fixture(scope="module")
def every(tmp_path_factory) -> Outcome:
    """Each of 10 updates, dropout on."""
    run = train(tmp_path_factory.mktemp("every"), *RUN, "Engine.save_load.save_steps=1")
    assert [record["updates"] for record in run.records()] == [1] * 10
    return run


def check(run: Outcome, every: Outcome, windows: list[tuple[int, int]]) -> None:
    """The records are of these windows, (first update, last update), each with their means."""
    records, single = run.records(), every.records()
    assert [(record["step"] - record["updates"] + 1, record["step"]) for record in records] == windows
    for record, (first, last) in zip(records, windows, strict=True):
        for name in ("loss", "grad_norm"):
            mean = np.mean([one[name] for one in single[first - 1 : last]])
            assert record[name] == pytest.approx(mean, rel=1e-14), (name, first, last)
        assert record["learning_rate"] == single[last - 1]["learning_rate"]


def values(run: Outcome) -> dict[int, tuple[float, float]]:
    return {record["step"]: (record["loss"], record["grad_norm"]) for record in run.records()}


@pytest.mark.parametrize(
    ("steps", "freq", "windows"),
    [(5, 10, [(1, 5)]), (7, 3, [(1, 3), (4, 6), (7, 7)]), (6, 3, [(1, 3), (4, 6)]), (1, 2, [(1, 1)])],
)
def test_the_last_window_is_logged_at_the_end(tmp_path, every, steps, freq, windows):
    run = train(tmp_path, *RUN, f"Engine.max_steps={steps}", f"Engine.logging_freq={freq}")
    check(run, every, windows)


def test_a_stop_logs_what_there_is_and_the_window_goes_on(tmp_path, every):
    """Stopped after updates 1 and 2 of a window of 5: the record of update 5 is that of the run that was not, to the bit."""
    straight = train(tmp_path / "straight", *RUN, FIVE)
    check(straight, every, [(1, 5), (6, 10)])
    for _ in range(2):
        assert train(tmp_path / "parts", *RUN, FIVE, AUTO, "Engine.save_load.stop_after_s=0").code == 75
    parts = train(tmp_path / "parts", *RUN, FIVE, AUTO)
    check(parts, every, [(1, 1), (1, 2), (1, 5), (6, 10)])
    assert values(parts).items() >= values(straight).items()
    again = train(tmp_path / "parts", *RUN, FIVE, AUTO)  # at the end already
    assert again.records() == parts.records()


@pytest.mark.parametrize("step", [3, 5, 7])
def test_a_crash_inside_a_window(every, tmp_path, step):
    """From any checkpoint: records of later updates are moved aside, and made anew."""
    run = train(tmp_path / "run", *RUN, FIVE, "Engine.save_load.save_steps=1")
    straight = values(run)
    for later in range(step + 1, 11):
        shutil.rmtree(run.output / f"step_{later:08d}")
    again = train(run.output, *RUN, FIVE, AUTO)
    check(again, every, [(1, 5), (6, 10)])
    assert values(again) == straight


def test_another_logging_freq_after_the_resume(tmp_path, every):
    train(tmp_path, *RUN, "Engine.max_steps=3", FIVE)
    run = train(tmp_path, *RUN, "Engine.logging_freq=4", AUTO)
    check(run, every, [(1, 3), (1, 4), (5, 8), (9, 10)])


def test_a_run_that_fails_logs_the_updates_before(tmp_path, every, monkeypatch):
    """What came before a loss that is not finite is what one wants to see."""
    made = TrainStep.run

    def run(self, *given):
        run.updates += 1
        if run.updates == 4:
            raise NotFinite("loss nan")
        return made(self, *given)

    run.updates = 0
    monkeypatch.setattr(TrainStep, "run", run)
    failed = train(tmp_path, *RUN, FIVE)
    assert failed.code == 1
    check(failed, every, [(1, 3)])


def test_the_window_stands_in_the_checkpoint_as_plain_numbers(tmp_path, every):
    """Sums of three updates; a loss that is not finite (float16 skips such updates) is null, as in metrics.jsonl."""
    run = train(tmp_path, *RUN, "Engine.max_steps=3", FIVE)
    losses, norms = ([record[name] for record in every.records()[:3]] for name in ("loss", "grad_norm"))
    window = json.loads((tmp_path / "step_00000003/manifest.json").read_text())["progress"]["window"]
    assert window == {
        "updates": 3, "loss": losses[0] + losses[1] + losses[2], "found_inf": 0, "norms": 3,
        "grad_norm": norms[0] + norms[1] + norms[2],
    }  # fmt: skip
    assert run.checkpoint(3).manifest.progress["window"] == window
