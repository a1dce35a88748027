"""Trains on the pretend device: `python -m tests.device.run ARGUMENTS [-- ARGUMENTS]…`, each as for tools/train.py.

The runs follow one another in one process, since the imports take longer than a short training. `Global.device=npu` is set for
each. The exit code is the largest of the runs'.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.launch import LaunchResult
from tests.training import REPO, TINY, Outcome, arguments

DEVICE = "Global.device=npu"
_MARK = "== end of run, exit code"


def environment() -> dict[str, str]:
    """Variables of a process that sees the pretend device; builds it. See `build.device_folder`."""
    from tests.device.build import device_folder

    return {
        "CUSTOM_DEVICE_ROOT": str(device_folder()),
        # views of other layouts of memory would reach the CPU's kernels, which take every tensor for a contiguous one
        "FLAGS_use_stride_kernel": "0",
        "GLOG_minloglevel": "2",  # it tells at length how it loads the device
    }


def train_many(
    runs: dict[str, tuple[str, ...]], folder: Path, config: str = TINY, timeout: float = 300.0
) -> dict[str, Outcome]:
    """Several trainings in one process, each with its overrides.

    A run writes to the folder of its name up to a `/`, so that `name/2` may resume `name/1`. An outcome has its run's own exit
    code and, as the launch's only log, what it printed; -9 stands for a run that was not reached.
    """
    outputs = {name: folder / name.partition("/")[0] for name in runs}
    lines = [[*arguments(outputs[name], DEVICE, *overrides, config=config), "--"] for name, overrides in runs.items()]
    quiet = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "tests.device.run", *itertools.chain(*lines)]
    with tempfile.TemporaryFile("w+") as log:
        ended = subprocess.run(
            command,
            cwd=REPO,
            env=os.environ | quiet | environment(),
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=timeout,
        )
        log.seek(0)
        parts = log.read().split(_MARK)
    outcomes = {}
    for number, name in enumerate(runs):
        reached = number + 1 < len(parts)
        code = int(parts[number + 1].split(maxsplit=1)[0]) if reached else -9
        text = parts[min(number, len(parts) - 1)]
        outcomes[name] = Outcome(code, outputs[name], LaunchResult(ended.returncode, [text], "", 0, False))
    return outcomes


def main(argv: list[str]) -> int:
    """Runs each; in this process if it sees the device, else in one that does."""
    wanted = environment()
    if os.environ.get("CUSTOM_DEVICE_ROOT") != wanted["CUSTOM_DEVICE_ROOT"]:  # Paddle read it when it was imported
        os.environ.update(wanted)
        os.execv(sys.executable, [sys.executable, "-m", "tests.device.run", *argv])
    from tools.train import main as train

    codes = []
    for is_end, line in itertools.groupby(argv, "--".__eq__):
        if not is_end:
            codes.append(train([*line, "-o", DEVICE]))
            sys.stderr.flush()
            print(_MARK, codes[-1], flush=True)
    return max(codes)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
