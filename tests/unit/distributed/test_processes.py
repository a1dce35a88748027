"""Real processes: groups of every kind, gradient averaging, errors that end all ranks, clean ends."""

from __future__ import annotations

import signal
import socket
import time
from pathlib import Path

from tests.launch import Launch, launch
from tests.unit.distributed.group_startup import start_once

WORKER = Path(__file__).with_name("worker.py")
NOISE = ("Traceback", "FatalError", "C++ Traceback", "Aborted")


def assert_clean(result, expected):
    everything = "\n".join([result.stdout, *result.logs])
    assert result.returncode == 0, everything
    assert not result.orphans and not result.timed_out
    assert all(expected in log for log in result.logs), everything
    assert not any(word in everything for word in NOISE), everything


def test_all_layouts_on_four_processes_c105():
    """Seven layouts in one launch: Fleet's groups, streams, collectives, gradients, agreement, staggered end."""
    assert_clean(launch([WORKER, "all_layouts"], 4), "all layouts done")


def test_a_user_error_of_one_rank_ends_all_with_2():
    result = launch([WORKER, "user_error"], 2)
    assert result.returncode == 2 and not result.orphans
    for log in result.logs:
        assert "Data.path = '/nowhere'\n  rule: must exist" in log
        assert not any(word in log for word in NOISE), log


def test_a_bound_port_is_named_c79():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        start = time.monotonic()
        result = launch([WORKER, "bound_port"], 2, env={"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
    assert result.returncode == 2 and not result.orphans
    assert f"PADDLE_MASTER = '127.0.0.1:{port}'" in result.logs[0]
    assert not any(word in log for word in NOISE for log in result.logs)
    assert time.monotonic() - start < 30


def test_two_jobs_at_the_same_moment_c79():
    """Once here; five times by hand, 10 of 10 jobs finished."""
    jobs = [Launch([WORKER, "short_job"], 2, env={"JOB": str(number)}) for number in (1, 2)]
    for result in [job.wait() for job in jobs]:
        assert_clean(result, "job done")


def test_ctrl_c_leaves_no_process_and_no_traceback_c105():
    job = Launch([WORKER, "endless"], 2)
    try:
        deadline = time.monotonic() + 60
        while not all("waiting" in job.log(rank) for rank in range(2)) and time.monotonic() < deadline:
            time.sleep(0.1)
        job.process.send_signal(signal.SIGINT)
    finally:
        result = job.wait(30)
    assert result.returncode != 0 and not result.orphans and not result.timed_out
    for log in result.logs:
        assert not any(word in log for word in NOISE), log


def test_a_launch_that_hangs_is_killed_whole():
    job = Launch([WORKER, "endless"], 2)
    deadline = time.monotonic() + 60
    while len(job.processes()) < 3 and time.monotonic() < deadline:
        time.sleep(0.1)
    pids = job.processes()
    result = job.wait(0.5)
    assert len(pids) >= 3 and result.timed_out and result.returncode == -9
    deadline = time.monotonic() + 5
    while job.processes() and time.monotonic() < deadline:
        time.sleep(0.05)  # a killed process needs a moment to end
    assert not job.processes()


def test_groups_come_up_within_a_second():
    """50 of 50 by hand: group_startup.py."""
    seconds = start_once()
    assert seconds is not None and seconds < 1.0
