"""Saves that fail in a run: the run goes on, says so, and its exit code tells; nothing that was saved is lost."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from ppfleetx.checkpoint import manager as manager_module
from ppfleetx.checkpoint.manifest import verify
from ppfleetx.engine.failures import EXIT_SAVE_FAILED
from tests.launch import launch
from tests.training import REPO, Outcome, arguments, train

RUN = ("Model.num_layers=1", "Engine.save_load.save_steps=1")
AUTO = "Engine.save_load.ckpt_dir=auto"


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.glob("step_*"))


@pytest.mark.parametrize("failing", [2, 4], ids=["in between", "the last"])
def test_a_failed_save_does_not_end_the_run(tmp_path, monkeypatch, capsys, failing):
    write_own = manager_module.write_own

    def strike(folder, rank, snapshot):
        if snapshot.progress["step"] == failing:
            raise OSError(28, "No space left on device")
        write_own(folder, rank, snapshot)

    monkeypatch.setattr(manager_module, "write_own", strike)
    run = train(tmp_path, *RUN, "Engine.max_steps=4")
    assert run.code == EXIT_SAVE_FAILED == 74
    assert [record["step"] for record in run.records()] == [1, 2, 3, 4]
    assert steps(tmp_path) == [step for step in (1, 2, 3, 4) if step != failing]
    text = capsys.readouterr().out
    assert f"step {failing} was NOT saved: rank 0 cannot write a checkpoint: [Errno 28] No space left" in text
    assert f"saving failed at step {failing}" in text.splitlines()[-1]


def test_memory_that_is_short_fails_the_save_alone(tmp_path, monkeypatch, capsys):
    take = manager_module.Snapshots.take

    def strike(self, state):
        if state.progress["step"] == 2:
            raise RuntimeError("ResourceExhaustedError: Fail to alloc memory")
        return take(self, state)

    monkeypatch.setattr(manager_module.Snapshots, "take", strike)
    assert train(tmp_path, *RUN, "Engine.max_steps=3").code == EXIT_SAVE_FAILED
    assert steps(tmp_path) == [1, 3] and "Fail to alloc memory" in capsys.readouterr().out


@pytest.fixture
def small_disk(tmp_path):
    """A tmpfs of 4 MB; two checkpoints of the model below fit, three do not."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"this machine lets nobody mount a tmpfs: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_loses_nothing(small_disk, capsys):
    """The first saves fit, then the disk is full; what was saved stands, and once there is room the next run goes on."""
    big = (*RUN, "Model.hidden_size=128")  # 246 thousand parameters, so 1.5 MB with two moments twice that
    run = train(small_disk, *big, "Engine.max_steps=6")
    assert run.code == EXIT_SAVE_FAILED and len(run.records()) == 6
    assert "No space left on device" in capsys.readouterr().out
    whole = steps(small_disk)
    assert 0 < len(whole) < 6 and all(verify(path) == [] for path in small_disk.glob("step_*"))
    assert not list(small_disk.glob(".step_*"))
    limited = train(small_disk, *big, "Engine.max_steps=6", AUTO, "Engine.save_load.keep_last=1")
    assert limited.code == EXIT_SAVE_FAILED  # no room for a second one, so none is deleted
    assert steps(small_disk) == whole
    subprocess.run(["mount", "-o", "remount,size=40m", str(small_disk)], check=True)
    again = train(small_disk, *big, "Engine.max_steps=8", AUTO, "Engine.save_load.keep_last=2")
    assert again.code == 0 and steps(small_disk) == [7, 8]
    assert [record["step"] for record in again.records()] == list(range(1, 9))


def test_a_rank_killed_while_it_saves_leaves_the_checkpoint_before(tmp_path):
    """Real training on two processes; rank 1 dies by SIGKILL half-way through its shard of step 3."""
    worker = [REPO / "tests/crash/killed_in_save.py", *arguments(tmp_path, *RUN, "Engine.max_steps=50")]
    result = launch(worker, 2, timeout=60, cwd=REPO)
    assert result.returncode not in (0, 2) and not result.timed_out and result.orphans == 0
    assert steps(tmp_path) == [1, 2]
    assert all(verify(path) == [] for path in tmp_path.glob("step_*"))
    resumed = train(tmp_path, *RUN, "Engine.max_steps=4", AUTO)
    assert resumed.code == 0 and steps(tmp_path) == [1, 2, 3, 4] and not list(tmp_path.glob(".step_*"))
    assert [record["step"] for record in resumed.records()] == [1, 2, 3, 4]


def test_output_dir_that_becomes_read_only_does_not_end_the_run(tmp_path):
    command = [sys.executable, "-m", "tests.crash.read_only", *arguments(tmp_path, *RUN, "Engine.max_steps=4")]
    ended = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=60)
    tmp_path.chmod(0o755)
    assert ended.returncode == EXIT_SAVE_FAILED, ended.stdout + ended.stderr
    assert "step 3 was NOT saved" in ended.stdout and "Permission denied" in ended.stdout
    assert "saving failed at step 3, 4" in ended.stdout
    assert steps(tmp_path) == [1, 2] and len(Outcome(0, tmp_path).records()) == 4


def test_a_run_that_fails_completes_the_save_under_way(tmp_path, monkeypatch):
    """A loss that is not finite, in the update after a save that takes long."""
    write_own = manager_module.write_own

    def slowly(*arguments):
        time.sleep(1.0)
        write_own(*arguments)

    monkeypatch.setattr(manager_module, "write_own", slowly)
    fault = [f"Debug.fault.{key}" for key in ("rank=0", "step=2", "kind=inf_grad")]
    assert train(tmp_path, *RUN, "Engine.max_steps=4", *fault).code == 1
    assert steps(tmp_path) == [1] and verify(tmp_path / "step_00000001") == []


def test_an_output_dir_that_is_not_shared_is_refused_at_the_start(tmp_path):
    """Not after hours, at the first save."""
    worker = [REPO / "tests/crash/not_shared.py", tmp_path, *arguments(tmp_path, *RUN, "Engine.max_steps=2")]
    result = launch(worker, 2, timeout=60, cwd=REPO)
    assert result.returncode == 2 and result.orphans == 0
    assert "rank 1 does not see what rank 0 writes there" in result.logs[0], result.logs[0]
    assert not list(tmp_path.glob("node*/.shared*")) and not list(tmp_path.glob("node*/step*"))
