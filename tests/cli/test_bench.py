"""tools/bench.py at tiny sizes: what it reports, and that the two loops it compares compute the same. No timing is judged."""

from __future__ import annotations

import json
import subprocess
from types import SimpleNamespace

import pytest

from tests.training import REPO
from tools.bench import main

TINY = ("Model.hidden_size=32", "Model.num_layers=2", "Model.max_position_embeddings=16")


def run(capsys, report, *arguments):
    """(printed lines, the JSON report) of a run that succeeds."""
    assert main([*arguments, "--json", str(report)]) == 0
    return capsys.readouterr().out.splitlines(), json.loads(report.read_text())


def test_engine(tmp_path, capsys):
    overrides = ["-o", *TINY, "Data.Train.dataset.max_seq_len=16"]
    lines, report = run(capsys, tmp_path / "r.json", "engine", "--rounds", "2", "--steps", "10", *overrides)
    assert "Paddle 3." in lines[0] and "MKL_DEBUG_CPU_TYPE" in lines[0]
    assert report["cpu"].startswith("1 thread, ") and f"both: {report['cpu']}" in lines
    assert lines[-1].startswith("engine / bare = ") and lines[-1].endswith("(budget 1.03)")
    assert {"cpu", "cores", "paddle", "commit", "mkl_debug_cpu_type"} <= set(report["machine"])
    assert len(report["rounds"]) == 2 and all(value > 0 for one in report["rounds"] for value in one.values())
    # warm-up and two rounds; the weights move, so equal losses mean equal gradients, clips, updates and dropout masks
    assert len(set(report["losses_engine"])) == len(report["losses_bare"]) == 3
    assert report["max_loss_difference"] < 1e-5


def test_losses_differ_when_the_loops_do(tmp_path, capsys, monkeypatch):
    """The comparison of losses can fail: a bare loop that does not clip is found out."""
    from ppfleetx.bench import engine

    monkeypatch.setattr(engine.nn, "ClipGradByGlobalNorm", lambda norm: None)
    overrides = ["-o", *TINY, "Data.Train.dataset.max_seq_len=16", "Optimizer.grad_clip.clip_norm=1.0e-9"]
    _, report = run(capsys, tmp_path / "r.json", "engine", "--rounds", "1", "--steps", "10", *overrides)
    assert report["max_loss_difference"] > 1e-5


def test_data(tmp_path, capsys):
    lines, report = run(
        capsys, tmp_path / "r.json", "data", "--rounds", "2", "--documents", "1000", "--tokens", "500000"
    )
    assert lines[-1].startswith("set-up = ") and "budget 0.5 s" in lines[-1]
    assert (report["documents"], report["tokens"], len(report["seconds"])) == (1000, 500000, 2)
    assert report["samples"] == (969 * 500 - 1) // 1024
    assert 0 < report["seconds_min"] <= report["seconds_median"] and 0 < report["peak_traced_mib"] < 100


def test_checkpoint(tmp_path, capsys, monkeypatch):
    """What is loaded is compared inside; a resume late in a run logs its first update as that of the late step."""
    from ppfleetx.bench import checkpoint

    monkeypatch.setattr(checkpoint, "SETTLE_S", 0)
    folder = tmp_path / "disk"
    folder.mkdir()
    sizes = ["--rounds", "2", "--megabytes", "3", "--folder", str(folder)]
    lines, report = run(capsys, tmp_path / "r.json", "checkpoint", *sizes)
    assert report["bytes"] == 24 * 10 * 1024 * 4 * 3  # 24 matrices of 10 rows of 1024 float32, with two moments
    seconds = report["seconds"]
    assert {name: len(values) for name, values in seconds.items()} == {
        "first_block": 1, **dict.fromkeys(("copy", "plain_save", "block", "save", "plain_load", "load"), 2),
    }  # fmt: skip
    assert all(value > 0 for values in seconds.values() for value in values)
    assert all(block < save for block, save in zip(seconds["block"], seconds["save"], strict=True))
    assert "of plain (budget at least 0.8)" in lines[-1] and report["late_resume_s"] > 0.3
    assert not list(folder.iterdir())


def test_recompute(tmp_path, capsys):
    overrides = ["-o", "Model.hidden_size=64", "Data.Train.dataset.max_seq_len=64"]
    lines, report = run(capsys, tmp_path / "r.json", "recompute", *overrides)
    kinds = report["kinds"]
    assert list(kinds) == ["none", "core_attn", "full_attn", "full"]
    live = [kinds[name]["activation_bytes"] for name in ("full", "full_attn", "core_attn", "none")]
    assert live == sorted(live) and len(set(live)) == 4 and live[0] < live[-1] / 2
    # kept for the backward pass of softmax(q·kᵀ)·v: at least probabilities and their dropout's result, float32, of 4 blocks,
    # 8 samples, 4 heads and 64 × 64 places; recomputed, those of one block at a time
    scores = 8 * 4 * 64 * 64 * 4
    assert kinds["none"]["activation_bytes"] - kinds["core_attn"]["activation_bytes"] >= 3 * 2 * scores
    assert len({one["loss"] for one in kinds.values()}) == 1, "dropout is on, and nothing changes to the bit"
    assert all(one["peak_bytes"] > one["activation_bytes"] for one in kinds.values())
    assert lines[-1].startswith("activations and gradients with full / without = ")


def test_quickstart(tmp_path, capsys, monkeypatch):
    """This repository beside a folder that holds it: each is started at its own defaults, whatever stands here."""
    from ppfleetx.bench import quickstart

    environments = []
    started = quickstart.subprocess.run
    spy = SimpleNamespace(run=lambda *a, **k: environments.append(k["env"]) or started(*a, **k))
    monkeypatch.setattr(quickstart, "subprocess", spy)
    for name in ("OMP_NUM_THREADS", "MKL_DEBUG_CPU_TYPE"):
        monkeypatch.setenv(name, "1")
    small = ["-o", "Model.hidden_size=32", "Model.num_layers=1", "Model.vocab_size=256"]
    sizes = ["--against", str(REPO), "--rounds", "1", "--steps", "10"]
    lines, report = run(capsys, tmp_path / "r.json", "quickstart", *sizes, *small)
    (now,), (against,) = report["seconds"]["now"], report["seconds"]["against"]
    assert report["ratios"] == [against / now] == [report["ratio"]] and now > 0
    assert lines[-1].startswith("quickstart step ") and report["limit"] in (1.5, 2.5)
    assert len(environments) == 2 and not {"OMP_NUM_THREADS", "MKL_DEBUG_CPU_TYPE"} & set().union(*environments)


def test_what_the_quickstart_is_compared_with(tmp_path, capsys, monkeypatch):
    """A commit is unpacked as it was, and what is no commit is a mistake."""
    from ppfleetx.bench import quickstart

    def git(*words):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=clone, check=True)

    clone = tmp_path / "clone"
    (clone / "tools").mkdir(parents=True)
    (clone / "tools/train.py").write_text("first")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    (clone / "tools/train.py").write_text("changed since")
    monkeypatch.setattr(quickstart, "_ROOT", clone)
    assert (quickstart._clone("HEAD", tmp_path / "there") / "tools/train.py").read_text() == "first"
    assert quickstart._clone(str(clone), tmp_path / "unused") == clone
    for wrong in ("no-such-commit", "--output=here"):
        assert main(["quickstart", f"--against={wrong}"]) == 2
        assert f"--against = '{wrong}'" in capsys.readouterr().err
    assert not (clone / "here").exists()


def test_a_wrong_setting_is_a_users_mistake(capsys):
    assert main(["engine", "-o", "Model.hiden_size=32"]) == 2
    assert "Model.hidden_size" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--steps", "15"], ["--rounds", "0"]])
def test_counts_are_checked(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["engine", *arguments])
    assert stopped.value.code == 2 and arguments[0] in capsys.readouterr().err
