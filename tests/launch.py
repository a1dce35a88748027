"""Starts real processes with Paddle's launcher, for every test that needs more than one. Leaves none behind."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).resolve().parents[1]

#: marks every process of one launch, so that those the launcher leaves behind are found
_MARK = "PPFLEETX_TEST_LAUNCH"

_QUIET = {"OMP_NUM_THREADS": "1", "GLOG_minloglevel": "2", "PYTHONWARNINGS": "ignore", "PYTHONUNBUFFERED": "1"}


class LaunchResult(NamedTuple):
    """How a launch ended.

    Attributes:
        returncode: the launcher's; -9 if it ran into the time limit.
        logs: what each rank printed (standard output and error), by rank.
        stdout: what the launcher itself printed (both streams).
        orphans: how many processes were still there after the launcher had ended, and were killed.
        timed_out: it ran into the time limit.
    """

    returncode: int
    logs: list[str]
    stdout: str
    orphans: int
    timed_out: bool


def launch(
    script_args: Sequence[str | os.PathLike[str]],
    nproc: int,
    *,
    env: Mapping[str, str] | None = None,
    timeout: float = 120.0,
    cwd: str | os.PathLike[str] | None = None,
    launch_args: Sequence[str] = (),
) -> LaunchResult:
    """Run `python -m paddle.distributed.launch --nproc_per_node NPROC SCRIPT ARG…`, for `timeout` seconds at most.

    `script_args` is the script and its arguments, `launch_args` goes to the launcher, `env` over the environment.
    """
    job = Launch(script_args, nproc, env=env, cwd=cwd, launch_args=launch_args)
    return job.wait(timeout)


class Launch:
    """A launch under way; `wait` must be called. For tests that signal it or run two at once."""

    def __init__(
        self,
        script_args: Sequence[str | os.PathLike[str]],
        nproc: int,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        launch_args: Sequence[str] = (),
    ):
        self._mark = uuid.uuid4().hex
        self._nproc = nproc
        self._folder = tempfile.TemporaryDirectory(prefix="ppfleetx-launch-")
        self._stdout = Path(self._folder.name, "stdout")
        command = [sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node", str(nproc)]
        command += [
            "--log_dir",
            str(Path(self._folder.name, "log")),
            *launch_args,
            *(os.fspath(one) for one in script_args),
        ]
        with open(self._stdout, "wb") as out:
            self.process = subprocess.Popen(
                command,
                env=self._environment(env),
                cwd=cwd,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _environment(self, extra: Mapping[str, str] | None) -> dict[str, str]:
        # A launch inside a launched process must not inherit its rank.
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("PADDLE_", "FLAGS_"))}
        path = os.pathsep.join([str(REPO), *filter(None, [environment.get("PYTHONPATH")])])
        # Ports below the range that Linux gives to outgoing connections, and another stretch for each launch.
        first = random.randrange(15000, 32000, 50)
        ports = {"PORT_RANGE": f"{first}:{first + 49}"}
        return {**environment, **_QUIET, **ports, "PYTHONPATH": path, _MARK: self._mark, **(extra or {})}

    def processes(self) -> list[int]:
        """Ids of the living processes of this launch: the launcher, the ranks and whatever they started."""
        mark, found = f"{_MARK}={self._mark}".encode(), []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                pass  # ended meanwhile, or not ours
        return found

    def log(self, rank: int) -> str:
        """What a rank has printed so far."""
        path = Path(self._folder.name, "log", f"workerlog.{rank}")
        return path.read_text(errors="replace") if path.exists() else ""

    def wait(self, timeout: float = 120.0) -> LaunchResult:
        """The result once the launcher ends; after `timeout` seconds all its processes are killed."""
        timed_out = False
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            orphans = self._kill_all(grace_s=0.0 if timed_out else 2.0)
            self.process.wait()
        stdout = self._stdout.read_text(errors="replace")
        logs = [self.log(rank) for rank in range(self._nproc)]
        self._folder.cleanup()
        return LaunchResult(self.process.returncode, logs, stdout, orphans, timed_out)

    def _kill_all(self, grace_s: float) -> int:
        """Kill what is left after `grace_s` seconds, the launcher first; gives how many there were."""
        deadline = time.monotonic() + grace_s
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in sorted(left, key=lambda pid: pid != self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(left)
