"""The CPU backend's collectives, messages and tensor-parallel functions on 2 and on 4 real processes."""

from __future__ import annotations

from pathlib import Path

from tests.launch import launch

WORKER = Path(__file__).with_name("collectives_worker.py")


def test_two_processes_and_a_lost_message():
    """All scenes; then rank 1 leaves with a message to it under way: rank 0 hears of it, and ends with an error."""
    result = launch([WORKER], 2)
    everything = "\n".join([result.stdout, *result.logs])
    assert all("all collectives done" in log for log in result.logs), everything
    assert "heard of the lost message" in result.logs[0], everything
    assert "ppfleetx: a message from rank 0 to rank 1 was lost" in result.logs[0]
    assert result.returncode == 1 and not result.orphans and not result.timed_out


def test_four_processes_and_groups_that_share_ranks():
    result = launch([WORKER], 4)
    everything = "\n".join([result.stdout, *result.logs])
    assert result.returncode == 0 and not result.orphans, everything
    assert all("all collectives done" in log for log in result.logs), everything
    assert "Traceback" not in everything and "lost" not in everything
