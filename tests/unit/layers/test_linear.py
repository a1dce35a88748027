"""The column-parallel linear layer on 2 real processes (linear_worker.py): the numbers of an edge and a plain linear layer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch import launch

SCENES = (
    "the_numbers_of_edge_and_linear",
    "frozen_parts",
    "communication_runs_beside_dw",
    "only_the_local_part_is_kept",
)


@pytest.fixture(scope="module")
def logs() -> list[str]:
    """What the processes printed; each scene says that it held."""
    result = launch([Path(__file__).with_name("linear_worker.py")], 2)
    assert not result.orphans and not result.timed_out
    return result.logs


@pytest.mark.parametrize("scene", SCENES)
def test_scene_holds_on_both_ranks(logs, scene):
    assert all(f"{scene} held" in log for log in logs), "\n".join(log[-2000:] for log in logs)
