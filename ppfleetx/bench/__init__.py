"""Benchmarks that `tools/bench.py` runs, and where they ran. What is published comes with `machine()`'s answer."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from ppfleetx.distributed.cpu import KERNELS, cores

#: updates between two log lines of the engine's benchmark
LOGGING_FREQ = 10


def machine() -> dict[str, Any]:
    """Hardware, versions and commit of this run, as JSON values. Imports Paddle."""
    import numpy
    import paddle

    return {
        "cpu": _cpu_model(),
        "cores": cores(),
        "load_average": os.getloadavg()[0],
        "mkl_debug_cpu_type": os.environ.get(KERNELS, "unset"),
        "device": paddle.get_device(),
        "python": platform.python_version(),
        "paddle": paddle.__version__,
        "numpy": numpy.__version__,
        "commit": _commit(),
    }


def machine_line(found: dict[str, Any]) -> str:
    """The same on one line."""
    return (
        f"{found['cpu']}, {found['cores']} cores (load {found['load_average']:.1f}), {KERNELS} "
        f"{found['mkl_debug_cpu_type']}, device {found['device']}, Python {found['python']}, Paddle {found['paddle']}, "
        f"NumPy {found['numpy']}, commit {found['commit']}"
    )


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()


def _commit() -> str:
    """Short commit, with `+changes` where the working tree differs from it."""
    here = Path(__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True)
        changes = subprocess.run(["git", "status", "--porcelain"], cwd=here, capture_output=True, text=True)
    except OSError:
        return "unknown"
    if head.returncode != 0:
        return "none yet"
    return head.stdout.strip() + ("+changes" if changes.stdout.strip() else "")
