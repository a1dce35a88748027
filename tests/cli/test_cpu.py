"""What a command makes of this machine's CPU, seen from outside (`tests/unit/distributed/test_cpu.py` has the rules)."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ppfleetx.distributed.cpu import KERNELS, OMP_THREADS, best_kernels, cores
from tests.training import REPO, Outcome, arguments

SMALL = ("Model.num_layers=1", "Engine.max_steps=6")
#: 2 samples of 32 tokens times a matrix [256, 256] are 2^22 multiplications: enough to share
WIDE = (*SMALL, "Model.hidden_size=256")


def train(output, *overrides, **environment):
    """(what a process of its own leaves, standard output, standard error); this process's wishes are not handed on."""
    own = {name: value for name, value in os.environ.items() if name not in (KERNELS, OMP_THREADS)}
    command = [sys.executable, "tools/train.py", *arguments(output, *overrides)]
    done = subprocess.run(command, cwd=REPO, env={**own, **environment}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return Outcome(0, output), done.stdout, done.stderr


def cpu_line(shown):
    (line,) = [line.partition(" - CPU: ")[2] for line in shown.splitlines() if " - CPU: " in line]
    return line


def in_use(run):
    return run.checkpoint(6).manifest.run["cpu"]


def test_two_threads_compute_the_same_every_time(tmp_path):
    """`Global.cpu_threads`, OMP_NUM_THREADS and what Paddle says of the latter: nothing."""
    by_key, shown, _ = train(tmp_path / "key", *WIDE, "Global.cpu_threads=2")
    assert cpu_line(shown).startswith("2 threads a process (Global.cpu_threads; ")
    wish, shown, errors = train(tmp_path / "wish", *WIDE, "Global.cpu_threads=null", OMP_NUM_THREADS="2")
    assert cpu_line(shown).startswith("2 threads a process (OMP_NUM_THREADS; ")
    assert "OMP_NUM_THREADS" not in errors and "WISELY" not in errors
    assert in_use(by_key) == in_use(wish) == {"threads": 2, "kernels": best_kernels() or ""}
    assert by_key.losses() == wish.losses()


def test_without_a_wish(tmp_path):
    """As many threads as cores; 1 in the environment, which Paddle sets by itself, is no wish."""
    run, shown, _ = train(tmp_path / "wide", *WIDE, "Global.cpu_threads=null", OMP_NUM_THREADS="1")
    assert in_use(run)["threads"] == cores() and f"({cores()} core" in cpu_line(shown)
    run, shown, _ = train(tmp_path / "small", *SMALL, "Global.cpu_threads=null")
    assert in_use(run)["threads"] == 1


@pytest.mark.skipif(best_kernels() is None, reason="needs a processor whose kernels MKL does not choose by itself")
def test_kernels(tmp_path):
    """Of a wide model: in a small one the last bits of 18 of 20 weights differ after 6 updates, and those of no loss."""
    fast, shown, _ = train(tmp_path / "auto", *WIDE)
    assert cpu_line(shown).endswith(f"on AMD ({KERNELS}={best_kernels()})")
    slow, shown, _ = train(tmp_path / "off", *WIDE, "Global.cpu_kernels=off")
    assert cpu_line(shown).endswith("MKL's own kernels")
    same, shown, _ = train(tmp_path / "user", *WIDE, **{KERNELS: "4"})
    assert cpu_line(shown).endswith(f"MKL kernels ({KERNELS}=4)")
    assert [in_use(run)["kernels"] for run in (fast, slow, same)] == [best_kernels(), "", "4"]
    assert fast.losses() == pytest.approx(slow.losses(), rel=1e-5)
    assert fast.losses() != slow.losses(), "they differ in the last bits, so the switch reached MKL"
