"""Runs that are asked to stop: they save after the update, on all ranks alike, leave exit code 75, and go on to the bit."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from ppfleetx.engine.failures import EXIT_STOPPED
from tests.launch import Launch
from tests.training import REPO, Outcome, arguments, same_weights, train

SHORT = ("Model.num_layers=1", "Engine.max_steps=6")
ENDLESS = ("Model.num_layers=1", "Engine.max_steps=100000")
AUTO = "Engine.save_load.ckpt_dir=auto"


def steps(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step_*"))


def on_two(folder, ask, launch_s=60.0):
    """A run on two processes that `ask(job)` asks to stop once it trains; (outcome, seconds until everyone had gone)."""
    job = Launch([REPO / "tools/train.py", *arguments(folder, *ENDLESS)], 2, cwd=REPO)
    deadline = time.monotonic() + launch_s
    while job.log(0).count("[train]") < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    began = time.monotonic()
    ask(job)
    result = job.wait(60)
    assert not result.timed_out and result.orphans == 0, result.logs
    return Outcome(result.returncode, folder, result), time.monotonic() - began


def rank_of(pid: int) -> str | None:
    """The rank of a process of a launch; None for the launcher."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((each.decode()[18:] for each in variables if each.startswith(b"PADDLE_TRAINER_ID=")), None)


def check(run: Outcome, reason: str) -> None:
    """One checkpoint, of the last step in the log, whole; both ranks said why."""
    last = run.records()[-1]["step"]
    assert [record["step"] for record in run.records()] == list(range(1, last + 1))
    assert steps(run.output) == [f"step_{last:08d}"]
    assert f"stopped after step {last}: {reason}" in run.launched.logs[0], run.launched.logs[0][-3000:]
    assert "Traceback" not in "".join(run.launched.logs)
    again = train(run.output, *ENDLESS[:1], f"Engine.max_steps={last + 2}", AUTO)
    assert again.code == 0 and len(again.records()) == last + 2


@pytest.mark.parametrize(
    ("ask", "reason"),
    [(lambda folder: (folder / "STOP").touch(), "STOP was there"), (None, "Engine.save_load.stop_after_s is over")],
    ids=["file", "time"],
)
def test_one_process_stops_and_goes_on_to_the_bit(tmp_path, capsys, ask, reason):
    straight = train(tmp_path / "straight", *SHORT)
    folder = tmp_path / "parts"
    folder.mkdir()
    if ask is not None:
        ask(folder)
    limit = () if ask is not None else ("Engine.save_load.stop_after_s=0",)
    stopped = train(folder, *SHORT, *limit)
    assert stopped.code == EXIT_STOPPED == 75
    assert steps(folder) == ["step_00000001"] and not (folder / "STOP").exists()
    assert reason in capsys.readouterr().out
    resumed = train(folder, *SHORT, AUTO)
    assert resumed.code == 0 and resumed.losses() == straight.losses()
    assert same_weights(resumed.tensors(6), straight.tensors(6))


def test_a_signal_in_the_last_update_changes_nothing(tmp_path, monkeypatch):
    """The run is at its end anyway: exit code 0, and the handlers are put back."""
    from ppfleetx.engine.debug import Fault

    def strike(self, trainable):
        strike.updates += 1
        if strike.updates == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    strike.updates = 0
    monkeypatch.setattr(Fault, "strike", strike)
    before = signal.getsignal(signal.SIGTERM)
    assert train(tmp_path, *SHORT).code == 0 and steps(tmp_path) == ["step_00000006"]
    assert signal.getsignal(signal.SIGTERM) == before


def test_sigterm_through_the_launcher_leaves_time_to_save(tmp_path):
    run, seconds = on_two(tmp_path, lambda job: job.process.send_signal(signal.SIGTERM))
    assert run.code != 0 and seconds < 25
    check(run, "SIGTERM to rank ")


def test_sigusr1_to_any_worker_stops_all(tmp_path):
    def ask(job):
        os.kill(next(pid for pid in job.processes() if rank_of(pid) == "1"), signal.SIGUSR1)

    run, _ = on_two(tmp_path, ask)
    assert run.code == EXIT_STOPPED  # the launcher's: the code of its workers
    check(run, "SIGUSR1 to rank 1")


def test_the_file_stops_all_ranks(tmp_path):
    run, _ = on_two(tmp_path, lambda job: (tmp_path / "STOP").touch())
    assert run.code == EXIT_STOPPED and not (tmp_path / "STOP").exists()
    check(run, f"{tmp_path / 'STOP'} was there")
