"""The same command again, without `ckpt_dir=auto`, starts anew: what was there is moved, and a warning says how to go on."""

from __future__ import annotations

from pathlib import Path

from ppfleetx.checkpoint.manifest import MANIFEST
from tests.resume.short_run import AUTO, SMALL, from_path
from tests.training import Outcome, same_weights, train


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step_0*"))


def test_the_warning_tells_how_to_go_on_and_that_works(copy, stopped, capsys):
    """Two updates that nobody wanted; then what the warning says: updates 4 and 5 of the first run, whose log comes too."""
    straight = train(copy.parent / "straight", *SMALL, "Engine.max_steps=5")
    capsys.readouterr()
    assert train(copy, *SMALL, "Engine.max_steps=2").code == 0
    said = next(line for line in capsys.readouterr().out.splitlines() if "WARNING" in line)
    newest = copy / "previous-1/step_00000003"
    assert f"was moved to {copy / 'previous-1'}. To go on with that run instead, stop this one" in said
    assert f"start again with -o {from_path(newest)}; from then on -o {AUTO}" in said
    assert train(copy, *SMALL, "Engine.max_steps=4", from_path(newest)).code == 0
    assert names(copy / "previous-2") == ["step_00000001", "step_00000002"]
    run = train(copy, *SMALL, "Engine.max_steps=5", AUTO)
    assert names(copy) == ["step_00000004", "step_00000005"]
    assert run.losses() == straight.losses()
    assert same_weights(run.tensors(5), straight.tensors(5))
    assert Outcome(0, copy / "previous-1").losses() == stopped.losses()  # as it was


def test_auto_finds_nothing_but_knows_what_was_moved(copy, capsys):
    """The run that nobody wanted was stopped before its first save."""
    (copy / "step_00000003" / MANIFEST).unlink()  # the newest complete one is that of step 2
    fault = "Debug.fault={rank: 0, step: 1, kind: raise}"
    assert train(copy, *SMALL, "Engine.max_steps=2", fault).code == 1
    capsys.readouterr()
    assert train(copy, *SMALL, "Engine.max_steps=1", AUTO).code == 0
    said = f"starting afresh; to go on with the run that was moved aside: -o {from_path(copy / 'previous-1/step_00000002')}"
    assert said in capsys.readouterr().out


def test_without_a_complete_checkpoint_there_is_nothing_to_go_on_with(copy, capsys):
    for name in names(copy):
        (copy / name / MANIFEST).unlink()
    capsys.readouterr()
    assert train(copy, *SMALL, "Engine.max_steps=1").code == 0
    text = capsys.readouterr().out
    assert f"was moved to {copy / 'previous-1'}\n" in text and "To go on" not in text


def test_all_that_a_run_leaves_moves_and_nothing_else(copy):
    """Every file that this code writes into its folder, beside files of the user's with names that are close."""
    ours = {
        "config.yaml", "metrics.jsonl", "metrics.jsonl.old-1", "metrics.jsonl.old-12", "visualdl", "visualdl.old-1",
        "error.rank1.json", "profiler_log", "rank0_time_2026.paddle_trace.json", *names(copy),
    }  # fmt: skip
    users = {
        "config.yaml.bak", "metrics.jsonl.old", "metrics.csv", "my_visualdl", "error.txt", "notes", "step_abc", "weights",
        ".hidden.tmp", ".shared-with-me", "STOP.txt",
    }  # fmt: skip
    half_done = {
        ".step_00000004.tmp", ".step_00000001.deleted", f".shared-{'0f' * 16}", "metrics.jsonl.tmp",
        ".config.yaml.123.tmp", ".error.rank0.json.5.tmp",
    }  # fmt: skip
    folders = {"visualdl", "profiler_log", "notes", "weights", ".step_00000004.tmp", ".step_00000001.deleted"}
    for name in (ours | users | half_done) - {path.name for path in copy.iterdir()}:
        if name in folders:
            (copy / name).mkdir()
        else:
            (copy / name).write_text("{}")
    (copy / "profiler_log" / "rank0_time_1.paddle_trace.json").touch()
    (copy / "notes" / "rank0_time_1.paddle_trace.json").touch()
    (copy / "notes" / "mine.txt").touch()
    assert train(copy, *SMALL, "Engine.max_steps=1", "Profiler.profiler_log=profiler_log").code == 0
    moved = {path.name for path in (copy / "previous-1").iterdir()}
    assert moved == ours
    new = {"config.yaml", "metrics.jsonl", "step_00000001"}
    assert {path.name for path in copy.iterdir()} == users | new | {"previous-1", ".lock"}


def test_a_folder_of_profiles_that_holds_other_things_stays(copy):
    (copy / "notes").mkdir()
    for name in ("rank0_time_1.paddle_trace.json", "mine.txt"):
        (copy / "notes" / name).touch()
    assert train(copy, *SMALL, "Engine.max_steps=1", "Profiler.profiler_log=notes").code == 0
    assert len(list((copy / "notes").iterdir())) == 2 and not (copy / "previous-1/notes").exists()


def test_a_stop_is_for_the_run_that_comes_next(copy):
    (copy / "STOP").touch()
    assert train(copy, *SMALL, "Engine.max_steps=3").code == 75
    assert names(copy) == ["step_00000001"] and not (copy / "previous-1/STOP").exists()
