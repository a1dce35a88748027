"""A copy of this repository as a clone has it, and commands run in it as a user runs them."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]


def copy_repository(folder: Path) -> Path:
    """Copies everything that git does not ignore to `folder`, which must not exist, and gives it."""
    patterns = [line.strip().strip("/") for line in (REPO / ".gitignore").read_text(encoding="utf-8").splitlines()]
    ignored = shutil.ignore_patterns(".git", *filter(None, patterns))
    return Path(shutil.copytree(REPO, folder, symlinks=True, ignore=ignored))


def environment(folder: Path, **more: str) -> dict[str, str]:
    """This process's environment with `python` and the programs beside it first on PATH; `folder` gets the `python`."""
    folder.mkdir(parents=True, exist_ok=True)
    python = folder / "python"  # a script: a link would lose the virtual environment
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PADDLE_", "FLAGS_", "PYTHON"))}
    quiet = {"PYTHONWARNINGS": "ignore", "GLOG_minloglevel": "2", "OMP_NUM_THREADS": "1"}
    return {**kept, "PATH": path, **quiet, **more}


def run(command: str | list[str], cwd: Path, env: dict[str, str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Runs a command, given as text to bash; its two streams come back as one."""
    if isinstance(command, str):
        command = ["bash", "-euo", "pipefail", "-c", command]
    return subprocess.run(
        command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=timeout_s,
    )  # fmt: skip
