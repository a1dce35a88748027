"""Sharding's traps on a tiny model, each against one process, on 2 real processes (sharding_worker.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch import launch

SCENES = (
    "the_plan",
    "every_stage_and_trap",
    "unused_parameters_keep_their_values",
    "gradients_share_memory",
    "loaded_values_are_computed_with",
    "pieces_are_a_partition",
    "half_precision_has_float32_cuts",
    "main_gradients_at_stage_1",
    "offload_works_on_copies",
    "memory_falls",
)


@pytest.fixture(scope="module")
def logs() -> list[str]:
    """What the processes printed; each scene says that it held."""
    result = launch([Path(__file__).with_name("sharding_worker.py")], 2)
    assert not result.orphans and not result.timed_out
    return result.logs


@pytest.mark.parametrize("scene", SCENES)
def test_scene_holds_on_both_ranks(logs, scene):
    assert all(f"{scene} held" in log for log in logs), "\n".join(log[-2000:] for log in logs)
