"""What a start may find that the last run did not leave: changed data, another device, other names, a STOP, another run."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from paddle.base import core

from ppfleetx.checkpoint.files import sum_file
from ppfleetx.checkpoint.manifest import MANIFEST, read_manifest
from ppfleetx.checkpoint.reader import Checkpoint
from ppfleetx.distributed import Topology
from ppfleetx.distributed.cpu import KERNELS, CpuUse
from ppfleetx.engine import output_dir
from ppfleetx.engine.debug import Fault
from ppfleetx.engine.resume import _same_places
from tests.resume.short_run import AUTO, SMALL, from_path
from tests.training import REPO, train, train_on


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step_*"))


class TestNames:
    """A checkpoint in `output_dir` is continued there, by whatever name it is called."""

    def test_a_link(self, copy):
        (copy / "best").symlink_to("step_00000002")
        assert train(copy, *SMALL, "Engine.max_steps=3", from_path(copy / "best")).code == 0
        assert names(copy) == ["step_00000001", "step_00000002", "step_00000003"]
        assert names(copy / "previous-1") == ["step_00000003"]  # the one that was not continued

    def test_another_name(self, copy):
        (copy / "step_00000002").rename(copy / "best")
        assert train(copy, *SMALL, "Engine.max_steps=3", from_path(f"{copy}/best///")).code == 0
        assert names(copy) == ["step_00000001", "step_00000003"] and (copy / "best" / MANIFEST).exists()

    def test_the_home_folder(self, copy, monkeypatch):
        """A shell leaves the ~ of KEY=~/… as it is."""
        monkeypatch.setenv("HOME", str(copy.parent))
        monkeypatch.chdir(copy.parent)
        assert train(Path("~/new"), *SMALL, "Engine.max_steps=4", from_path("~/run/step_00000003")).code == 0
        assert names(copy.parent / "new") == ["step_00000004"] and not (copy.parent / "~").exists()

    def test_odd_names_and_foreign_folders(self, copy):
        odd = copy.rename(copy.with_name("a run, ü=中文"))
        for junk in ("step_abc", "step_7", ".step_00000002.tmp", "step_00000002.bak"):
            (odd / junk).mkdir()
        (odd / "step_00000009").write_text("no folder")
        run = train(odd, *SMALL, "Engine.max_steps=4", AUTO)
        assert run.code == 0 and [record["step"] for record in run.records()] == [1, 2, 3, 4]
        assert {"step_abc", "step_00000002.bak", "step_00000003", "step_00000004"} < set(names(odd))


def test_another_order_of_axes_draws_new_masks(copy):
    """dp 2 · mp 2 in two orders: rank 1 is another place, so the streams of its file are those of another rank."""
    saved = Checkpoint(copy / "step_00000003")
    run = saved.manifest.run
    run["layout"] |= {"dp": 2, "mp": 2}
    for order, same in {
        ("dp", "pp", "sharding", "mp", "sep"): True,
        ("pp", "dp", "sep", "mp", "sharding"): True,  # axes of degree 1 do not count
        ("mp", "pp", "sharding", "dp", "sep"): False,
    }.items():
        topology = Topology(0, 4, dp_degree=2, mp_degree=2, order=order)
        assert _same_places(SimpleNamespace(context=SimpleNamespace(topology=topology)), saved) is same


def test_another_kind_of_device_draws_new_masks(copy, capsys):
    """A generator's state fits its own kind of device only."""
    folder = copy / "step_00000003"
    file = folder / "rank_00000.json"
    file.write_text(file.read_text().replace('"device": "cpu"', '"device": "gpu"'))
    manifest = read_manifest(folder)
    files = manifest.files | {file.name: sum_file(file)}
    (folder / MANIFEST).write_text(replace(manifest, files=files).to_text())
    assert train(copy, *SMALL, "Engine.max_steps=4", AUTO).code == 0
    assert "random streams     seeded anew: the device is another one, gpu → cpu" in capsys.readouterr().out


def test_other_threads_and_kernels_are_said(copy, capsys, monkeypatch):
    """They decide the last bits, so "to the bit" holds for the same ones; older checkpoints do not say theirs."""

    def row(*overrides: str) -> str:
        assert train(copy, *SMALL, "Engine.max_steps=3", AUTO, *overrides).code == 0
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  CPU ")]
        return line.split(maxsplit=1)[1]

    folder, rule = copy / "step_00000003", "the last bits of what is computed may differ"
    manifest = read_manifest(folder)
    own = CpuUse(1, os.environ.get(KERNELS, ""))
    assert manifest.run["cpu"] == {"threads": 1, "kernels": own.kernels}
    assert row() == f"{own}, as saved"
    assert row("Global.cpu_threads=2") == f"{own} → {replace(own, threads=2)}: {rule}"
    core.set_num_threads(1)
    monkeypatch.setenv(KERNELS, "4")
    assert row() == f"{own} → 1 thread, {KERNELS}=4: {rule}"
    del manifest.run["cpu"]
    (folder / MANIFEST).write_text(manifest.to_text())
    assert row() == f"not saved → 1 thread, {KERNELS}=4: {rule}"


def test_data_that_changed_under_the_same_name_are_said(copy, tmp_path, capsys):
    """As many tokens and documents as before, in the same file: only the tokens are others."""
    data = shutil.copytree(REPO / "configs/debug/data", tmp_path / "data")
    there = [f"Data.{mode}.dataset.input_dir={data}" for mode in ("Train", "Eval")]
    assert train(copy, *SMALL, *there, "Engine.max_steps=4", AUTO).code == 0
    assert ", as saved" in capsys.readouterr().out  # the same data in another folder
    tokens = np.fromfile(data / "project.bin", np.uint8)
    tokens[::2] = np.roll(tokens[::2], 2)
    tokens.tofile(data / "project.bin")
    assert train(copy, *SMALL, *there, "Engine.max_steps=5", AUTO).code == 0
    assert "the data or their order changed" in capsys.readouterr().out


def test_epochs_end_where_they_end_whatever_the_batch_size(tmp_path):
    """An epoch of 4-sample updates, then of 12-sample ones: every sample is read, and each once."""
    epoch = ("Engine.run_mode=epoch", "Data.Train.dataset.split=[20,331,50]", "Data.Train.sampler.drop_last=false")
    first = train(tmp_path, *SMALL, *epoch, "Engine.max_steps=9", "Global.global_batch_size=4")
    assert first.code == 0 and first.checkpoint(9).manifest.progress["consumed_samples"] == 36
    second = train(tmp_path, *SMALL, *epoch, "Engine.max_steps=-1", "Global.global_batch_size=12", AUTO)
    assert second.code == 0
    last = second.records()[-1]["step"]
    consumed = second.checkpoint(last).manifest.progress["consumed_samples"]
    assert consumed > 48 and last == 9 + -(-(consumed - 36) // 12)
    straight = train(tmp_path / "straight", *SMALL, *epoch, "Engine.max_steps=-1", "Global.global_batch_size=12")
    end = straight.records()[-1]["step"]
    assert consumed == straight.checkpoint(end).manifest.progress["consumed_samples"]


def test_a_batch_size_that_follows_from_others_is_said(tmp_path, capsys):
    """As it does where the number of cards changes and `local_batch_size` does not."""
    given = (*SMALL, "Global.global_batch_size=null", "Optimizer.lr.decay_steps=null")
    assert train(tmp_path, *given, "Engine.max_steps=2", "Global.local_batch_size=4").code == 0
    assert train(tmp_path, *given, "Engine.max_steps=3", "Global.local_batch_size=8", AUTO).code == 0
    text = capsys.readouterr().out
    assert "config changed     Global.global_batch_size: 4 → 8" in text
    assert "config changed     Optimizer.lr.decay_steps: 2 → 3" in text


class TestStopFile:
    def test_one_that_came_too_late_stops_no_later_run(self, copy, monkeypatch):
        monkeypatch.setattr(Fault, "strike", lambda *_: (copy / "STOP").touch())
        assert train(copy, *SMALL, "Engine.max_steps=4", AUTO).code == 0
        assert not (copy / "STOP").exists()

    def test_one_that_cannot_be_removed_stops_all_the_same(self, copy, capsys):
        (copy / "STOP").mkdir()
        assert train(copy, *SMALL, "Engine.max_steps=9", AUTO).code == 75
        assert names(copy)[-1] == "step_00000004" and "STOP cannot be removed" in capsys.readouterr().out


class TestOutputDir:
    def test_two_runs_in_one_folder(self, copy, capsys, monkeypatch):
        """The second is refused and changes nothing; once the first has ended it may run."""
        monkeypatch.setattr(output_dir, "ENDING_S", 0.1)
        with open(copy / ".lock", "w") as lock:
            lock.write("process 7 on node3")
            lock.flush()
            fcntl.flock(lock, fcntl.LOCK_EX)
            assert train(copy, *SMALL, "Engine.max_steps=4").code == 2
            assert "another run writes there (process 7 on node3)" in capsys.readouterr().err
            assert len(names(copy)) == 3 and not (copy / "previous-1").exists()
        assert train(copy, *SMALL, "Engine.max_steps=4", AUTO).code == 0
        assert f"process {os.getpid()} on" in (copy / ".lock").read_text()

    def test_one_that_is_about_to_be_free_is_waited_for(self, copy):
        """A launcher starts anew while what it killed is still ending."""
        lock = open(copy / ".lock", "w")  # noqa: SIM115
        fcntl.flock(lock, fcntl.LOCK_EX)
        threading.Timer(3, lock.close).start()
        assert train(copy, *SMALL, "Engine.max_steps=4", AUTO).code == 0

    def test_one_that_is_a_file_is_a_users_mistake_under_the_launcher_too(self, tmp_path):
        (tmp_path / "file").write_text("x")
        run = train_on(2, tmp_path / "file", *SMALL, "Engine.max_steps=1")
        assert run.code == 2, run.launched
        text = "".join(run.launched.logs)
        assert "Traceback" not in text and text.count("the folder cannot be written") == 1, text

    def test_a_log_that_cannot_be_written(self, copy, capsys):
        (copy / "metrics.jsonl").unlink()
        (copy / "metrics.jsonl").mkdir()
        assert train(copy, *SMALL, "Engine.max_steps=4", AUTO).code == 2
        captured = capsys.readouterr()
        assert "metrics.jsonl" in captured.err and "Traceback" not in captured.err

    def test_what_a_save_left_and_nobody_can_remove_fails_no_save(self, copy, tmp_path):
        (copy / ".step_00000001.deleted").symlink_to(tmp_path)  # shutil.rmtree refuses a link, as it does a busy folder
        run = train(copy, *SMALL, "Engine.max_steps=4", AUTO)
        assert run.code == 0 and names(copy)[-1] == "step_00000004"


@pytest.mark.parametrize(("value", "said"), [
    ("step_00000003/manifest.json", "it is a file, and a checkpoint is a folder"),
    ("x" * 5000, "it cannot be read: File name too long"),
])  # fmt: skip
def test_paths_that_are_no_folders(copy, capsys, value, said):
    assert train(copy, *SMALL, "Engine.max_steps=4", from_path(copy / value)).code == 2
    captured = capsys.readouterr()
    assert said in captured.err and "Traceback" not in captured.err + captured.out


def test_moments_of_some_parameters_only_are_refused(copy, capsys):
    folder = copy / "step_00000003"
    manifest = read_manifest(folder)
    entries = [entry for entry in manifest.entries if entry.key != "norm.weight.moment1"]
    assert len(entries) == len(manifest.entries) - 1
    (folder / MANIFEST).write_text(replace(manifest, entries=entries).to_text())
    assert train(copy, *SMALL, "Engine.max_steps=4", from_path(folder)).code == 2
    assert "it has no moment1 of norm.weight, from which AdamW goes on" in capsys.readouterr().err


@pytest.mark.parametrize(
    "progress",
    [
        {},
        {"step": "3"},
        {"step": -3},
        {"step": float("nan")},
        {"skipped_steps": 2**63},
        {"evaluation_due": True},
        {"evaluation_due": None},
        {"window": 3},
        {"window": {"updates": -1}},
        {"window": {"loss": "5"}},
    ],
)
def test_progress_that_makes_no_sense_is_damage(copy, capsys, progress):
    folder = copy / "step_00000003"
    manifest = read_manifest(folder)
    wrong = {**manifest.progress, **progress} if progress else {"step": 3}
    (folder / MANIFEST).write_text(replace(manifest, progress=wrong).to_text())
    assert train(copy, *SMALL, "Engine.max_steps=4", from_path(folder)).code == 2
    captured = capsys.readouterr()
    assert "the checkpoint is damaged: its " in captured.err and "Traceback" not in captured.err


def with_progress(folder: Path, **changes) -> None:
    """Rewrites the progress of a checkpoint; None takes a counter away."""
    manifest = read_manifest(folder)
    progress = {name: value for name, value in {**manifest.progress, **changes}.items() if value is not None}
    (folder / MANIFEST).write_text(replace(manifest, progress=progress).to_text())


class TestOtherVersions:
    """A counter that a version added, or that a later one will add, makes no checkpoint damaged."""

    def test_counters_of_a_newer_version_are_skipped_and_said(self, copy, capsys):
        with_progress(copy / "step_00000003", experts_dropped=7, curriculum={"stage": 2})
        run = train(copy, *SMALL, "Engine.max_steps=4", AUTO)
        assert run.code == 0 and len(run.losses()) == 4
        said = "unknown counters   experts_dropped, curriculum: of a newer version, skipped"
        assert said in capsys.readouterr().out
        assert "experts_dropped" not in run.checkpoint(4).manifest.progress

    def test_counters_that_an_older_version_did_not_have_are_as_in_a_new_run(self, copy, capsys):
        """What version 94b6fee wrote: nothing is to be made up, and the log's window begins here."""
        with_progress(copy / "step_00000003", evaluation_due=None, window=None)
        run = train(copy, *SMALL, "Engine.max_steps=5", "Engine.eval_freq=3", "Engine.logging_freq=5", AUTO)
        assert run.code == 0 and not run.records("eval")
        assert [(record["step"], record["updates"]) for record in run.records()] == [(1, 1), (2, 1), (3, 1), (5, 2)]
        assert "new counters       evaluation_due, window: not in this checkpoint" in capsys.readouterr().out

    def test_without_the_counters_of_float16(self, copy):
        with_progress(copy / "step_00000003", skipped_steps=None, skipped_in_row=None, scaler=None)
        run = train(copy, *SMALL, "Engine.max_steps=4", AUTO)
        assert run.code == 0 and run.checkpoint(4).manifest.progress["skipped_steps"] == 0

    def test_a_checkpoint_of_this_version_says_nothing_of_versions(self, copy, capsys):
        assert train(copy, *SMALL, "Engine.max_steps=4", AUTO).code == 0
        assert "counters " not in capsys.readouterr().out

    def test_random_states_that_are_not_known_here_or_that_are_missing(self, copy, capsys):
        """The first go on to the bit; without one of ours nothing could."""
        straight = train(copy.parent / "straight", *SMALL, "Engine.max_steps=4")
        file = copy / "step_00000003" / "rank_00000.json"
        streams = json.loads(file.read_text())["streams"]
        for changed, said in (
            ({**streams, "numpy3": [1]}, "to the bit; not known here, skipped: numpy3"),
            (
                {name: value for name, value in streams.items() if name != "host"},
                "seeded anew: the checkpoint lacks host",
            ),
        ):
            folder = shutil.copytree(copy, copy.parent / said.partition(":")[0])
            (folder / "step_00000003" / file.name).write_text(json.dumps({"streams": changed}))
            manifest = read_manifest(folder / "step_00000003")
            files = manifest.files | {file.name: sum_file(folder / "step_00000003" / file.name)}
            (folder / "step_00000003" / MANIFEST).write_text(replace(manifest, files=files).to_text())
            run = train(folder, *SMALL, "Engine.max_steps=4", AUTO)
            assert run.code == 0 and f"random streams     {said}" in capsys.readouterr().out
            assert (run.losses() == straight.losses()) is ("to the bit" in said)
