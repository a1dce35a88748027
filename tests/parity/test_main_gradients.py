"""Main gradients on 4 processes: half-precision gradients are summed in float32 over every group, and masters change nothing
in float32, to the bit. (What half precision computes is for tests/gpu.)"""

from __future__ import annotations

import pytest

from tests.launch import launch
from tests.training import REPO

SMALL = (
    "Model.num_layers=8", "Model.hidden_size=32", "Engine.max_steps=3", "Optimizer.grad_clip.clip_norm=0.1",
    "Data.Train.loader.num_workers=0",
)  # fmt: skip
#: layout: size of a micro-batch, such that there are several
LAYOUTS = {"dp2mp2sp": 2, "sep2pp2rc": 2, "pp4vpp2": 1, "dp2sharding2s1": 1}


@pytest.fixture(scope="module")
def logs() -> list[str]:
    """What the processes printed."""
    result = launch([REPO / "tests/parity/main_gradients_worker.py"], 4, cwd=REPO)
    assert not result.orphans and not result.timed_out
    return result.logs


@pytest.mark.parametrize("scene", ["sums", *LAYOUTS])
def test_scene_holds_on_every_rank(logs, scene):
    assert all(f"{scene} held" in log for log in logs), "\n".join(log[-2000:] for log in logs)
