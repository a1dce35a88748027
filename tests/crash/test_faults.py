"""Runs that fail after their start: exit codes, records, who is named, and that nobody is left behind."""

from __future__ import annotations

import json
import signal
import time

import pytest

from tests.launch import Launch
from tests.training import REPO, arguments, train, train_on


def fault(rank, step, kind):
    return tuple(f"Debug.fault.{key}={value}" for key, value in {"rank": rank, "step": step, "kind": kind}.items())


@pytest.mark.parametrize("kind", ["raise", "exit", "kill"])
def test_c77_a_worker_that_dies_ends_the_job(tmp_path, kind):
    """Launcher exit code not 0, everyone gone in 30 s, rank 1 and its log named, earlier checkpoints good."""
    began = time.monotonic()
    run = train_on(2, tmp_path, "Engine.max_steps=50", "Engine.save_load.save_steps=1", *fault(1, 3, kind), timeout=60)
    assert run.code not in (0, 2) and time.monotonic() - began < 45 and run.launched.orphans == 0
    assert "rank 1" in run.launched.stdout.lower() or "workerlog.1" in run.launched.stdout, run.launched.stdout
    resumed = train(tmp_path, "Engine.max_steps=3", "Engine.save_load.ckpt_dir=auto")
    assert resumed.code == 0 and [record["step"] for record in resumed.records()] == [1, 2, 3]


def test_the_record_of_a_failure_names_step_and_cause(tmp_path):
    assert train(tmp_path, "Engine.max_steps=5", *fault(0, 3, "raise")).code == 1
    record = json.loads((tmp_path / "error.rank0.json").read_text())
    assert (record["rank"], record["step"], record["error"]) == (0, 3, "RuntimeError: Debug.fault: raise")
    assert any("strike" in line for line in record["traceback"])


def test_a_rank_that_fails_second_shows_the_first_cause(tmp_path):
    run = train_on(2, tmp_path, "Engine.max_steps=50", *fault(1, 3, "raise"), timeout=60)
    assert run.code not in (0, 2)
    text = run.launched.logs[0] + run.launched.stdout
    assert "rank 1 failed first, in step 3: RuntimeError: Debug.fault: raise" in text, text[-3000:]


@pytest.mark.parametrize("kind", ["nan_weight", "inf_grad"])
def test_not_finite_stops_before_the_update(tmp_path, capsys, kind):
    """The last checkpoint stands, the message has no traceback."""
    code = train(tmp_path, "Engine.max_steps=5", "Engine.save_load.save_steps=1", *fault(0, 3, kind)).code
    text = capsys.readouterr().err
    assert code == 1 and "step 3" in text and "gradient norm" in text and "Traceback" not in text
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_00000001", "step_00000002"]
    assert json.loads((tmp_path / "error.rank0.json").read_text())["step"] == 3


def test_not_finite_on_one_rank_stops_all_alike(tmp_path):
    run = train_on(2, tmp_path, "Engine.max_steps=5", *fault(1, 2, "inf_grad"), timeout=60)
    assert run.code not in (0, 2)
    assert all("step 2: loss" in log for log in run.launched.logs), run.launched.logs
    assert len(run.records()) == 1


def test_a_hanging_rank_ends_the_job(tmp_path):
    """Gloo gives up after 30 s."""
    began = time.monotonic()
    run = train_on(2, tmp_path, "Engine.max_steps=50", *fault(1, 2, "hang"), timeout=90)
    assert run.code not in (0, 2) and not run.launched.timed_out and run.launched.orphans == 0
    assert 25 < time.monotonic() - began < 75


@pytest.mark.parametrize("nproc", [2])
def test_c105_ctrl_c_ends_everyone(tmp_path, nproc):
    job = Launch([REPO / "tools/train.py", *arguments(tmp_path, "Engine.max_steps=100000")], nproc, cwd=REPO)
    deadline = time.monotonic() + 60
    while "[train]" not in job.log(0) and time.monotonic() < deadline:
        time.sleep(0.1)
    job.process.send_signal(signal.SIGINT)
    result = job.wait(40)
    assert result.returncode != 0 and not result.timed_out and result.orphans == 0


def test_ctrl_c_on_one_process_leaves_130(tmp_path, monkeypatch, capsys):
    from ppfleetx.engine.debug import Fault

    def interrupt(self, parameters):
        raise KeyboardInterrupt

    monkeypatch.setattr(Fault, "strike", interrupt)
    assert train(tmp_path, "Engine.max_steps=3").code == 130
    assert "interrupted" in capsys.readouterr().err
