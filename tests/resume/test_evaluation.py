"""An evaluation that a stop left out is made after the resume: once, with the numbers of a run that was not stopped."""

from __future__ import annotations

import json
import os
import shutil
import signal

import numpy as np
import pytest

from ppfleetx.data import CorpusWriter
from ppfleetx.engine import Engine
from ppfleetx.engine.debug import Fault
from ppfleetx.engine.failures import EXIT_STOPPED
from tests.resume.test_resume import timeless
from tests.training import Outcome, train, train_on

#: dropout on; evaluations after updates 2, 4 and 6, saves after 4 (and at the end)
RUN = (
    "Model.num_layers=1", "Engine.max_steps=6", "Engine.eval_freq=2", "Engine.eval_iters=2", "Engine.save_load.save_steps=4",
)  # fmt: skip
AUTO = "Engine.save_load.ckpt_dir=auto"


def stop_in(monkeypatch, update):
    """SIGTERM comes while that update is computed; the next start is left alone."""

    def strike(self, trainable):
        strike.updates += 1
        if strike.updates == update:
            os.kill(os.getpid(), signal.SIGTERM)
        fault(self, trainable)

    strike.updates, fault = 0, Fault.strike
    monkeypatch.setattr(Fault, "strike", strike)


def all_records(run: Outcome):
    """Train and eval records as they stand in the file."""
    return timeless([record for kind in ("train", "eval") for record in run.records(kind)])


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Outcome:
    run = train(tmp_path_factory.mktemp("straight"), *RUN)
    assert [record["step"] for record in run.records("eval")] == [2, 4, 6]
    return run


@pytest.mark.parametrize("step", [2, 4])
def test_a_stop_where_an_evaluation_is_due(tmp_path, straight, monkeypatch, capsys, step):
    """At step 4 a save is due as well."""
    stop_in(monkeypatch, step)
    stopped = train(tmp_path, *RUN)
    assert stopped.code == EXIT_STOPPED
    assert [record["step"] for record in stopped.records("eval")] == [n for n in (2, 4) if n < step]
    assert stopped.checkpoint(step).manifest.progress["evaluation_due"] == 1
    assert "goes on from here, with the evaluation that is due" in capsys.readouterr().out
    resumed = train(tmp_path, *RUN, AUTO)
    assert resumed.code == 0 and all_records(resumed) == all_records(straight)
    text = capsys.readouterr().out
    assert f"stopped before the evaluation after step {step}: it is made now" in text
    assert text.index(f"[eval] step: {step},") < text.index("[train]")  # first of all
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert [record["kind"] for record in lines] == ["train", "train", "eval"] * 3


def test_by_path_into_a_folder_of_its_own(tmp_path, straight, monkeypatch):
    stop_in(monkeypatch, 2)
    stopped = train(tmp_path / "a", *RUN)
    resumed = train(tmp_path / "b", *RUN, f"Engine.save_load.ckpt_dir={stopped.checkpoint(2).path}")
    assert resumed.code == 0
    assert timeless(resumed.records("eval")) == timeless(straight.records("eval"))
    assert timeless(resumed.records()) == timeless(straight.records())[2:]


def test_under_another_layout_and_at_the_end_of_the_run(tmp_path, straight, monkeypatch):
    """Stopped after update 2, which becomes the last: nothing is left to do but the evaluation, and after it nothing at all."""
    stop_in(monkeypatch, 2)
    assert train(tmp_path, *RUN).code == EXIT_STOPPED
    for _ in range(2):
        again = train_on(2, tmp_path, *RUN, "Engine.max_steps=2", AUTO)
        assert again.code == 0
        (found,) = again.records("eval")
        assert found["step"] == 2 and found["loss"] == pytest.approx(straight.records("eval")[0]["loss"], rel=1e-6)


def test_a_crash_after_the_evaluation_was_made_up(tmp_path, straight, monkeypatch):
    """The checkpoint of the stop still says that it is due, and the log that it was made: once is enough."""
    stop_in(monkeypatch, 2)
    train(tmp_path, *RUN)
    assert train(tmp_path, *RUN, AUTO, "Debug.fault={rank: 0, step: 3, kind: raise}").code == 1
    evaluations, evaluate = [], Engine.evaluate
    monkeypatch.setattr(Engine, "evaluate", lambda *given: evaluations.append(1) or evaluate(*given))
    resumed = train(tmp_path, *RUN, AUTO)
    assert len(evaluations) == 2  # after 4 and 6
    assert all_records(resumed) == all_records(straight)


def test_a_crash_within_the_evaluation_that_is_made_up(tmp_path, straight, monkeypatch):
    stop_in(monkeypatch, 2)
    train(tmp_path, *RUN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "evaluate", lambda *_: 1 / 0)
        assert train(tmp_path, *RUN, AUTO).code == 1
    assert all_records(train(tmp_path, *RUN, AUTO)) == all_records(straight)


def test_a_stop_after_an_evaluation_and_one_where_none_is_due_leave_nothing_to_make_up(tmp_path, monkeypatch, capsys):
    stop_in(monkeypatch, 3)
    stopped = train(tmp_path, *RUN)
    assert stopped.checkpoint(3).manifest.progress["evaluation_due"] == 0
    train(tmp_path, *RUN, AUTO)
    assert "it is made now" not in capsys.readouterr().out


def test_evaluation_that_was_switched_off_meanwhile(tmp_path, monkeypatch):
    stop_in(monkeypatch, 2)
    train(tmp_path, *RUN)
    resumed = train(tmp_path, *RUN, "Engine.eval_freq=0", AUTO)
    assert resumed.code == 0 and not resumed.records("eval") and len(resumed.losses()) == 6


def test_visualdl_shows_it_once(tmp_path, straight, monkeypatch):
    from visualdl import LogReader

    on = "Engine.visualdl=true"
    stop_in(monkeypatch, 4)
    train(tmp_path, *RUN, on)
    assert train(tmp_path, *RUN, on, AUTO).code == 0
    points = LogReader(file_path=str(tmp_path / "visualdl/vdlrecords.run.log")).get_data("scalar", "eval/loss")
    assert [point.id for point in points] == [2, 4, 6]
    assert [point.value for point in points] == pytest.approx(
        [one["loss"] for one in straight.records("eval")], rel=1e-6
    )


def test_at_the_end_of_an_epoch(tmp_path, monkeypatch):
    """10 updates an epoch (80 samples of 32 tokens and one more token): stopped after the first of two epochs. Batches of half
    the size afterwards: 20 more updates."""
    with CorpusWriter(tmp_path / "corpus", "megatron", 256) as writer:
        writer.append(np.random.default_rng(0).integers(1, 256, 2561))
        writer.finish()
    data = [f"Data.{mode}.dataset.{pair}" for mode, share in (("Train", "[1,0,0]"), ("Eval", "[0,1,0]"))
            for pair in (f"input_dir={tmp_path / 'corpus'}", f"split={share}")]  # fmt: skip
    run = (
        "Model.num_layers=1", *data, "Engine.run_mode=epoch", "Engine.num_train_epochs=2", "Engine.max_steps=-1",
        "Engine.eval_freq=1", "Engine.eval_iters=1",
    )  # fmt: skip
    whole = train(tmp_path / "whole", *run)
    assert [record["step"] for record in whole.records("eval")] == [10, 20]
    stop_in(monkeypatch, 10)
    assert train(tmp_path / "parts", *run).code == EXIT_STOPPED
    copied = shutil.copytree(tmp_path / "parts", tmp_path / "other")
    resumed = train(tmp_path / "parts", *run, AUTO)
    assert all_records(resumed) == all_records(whole)
    other = train(copied, *run, "Global.global_batch_size=4", AUTO)
    assert [record["step"] for record in other.records("eval")] == [10, 30]
    assert other.records("eval")[0]["batches"] == 1
