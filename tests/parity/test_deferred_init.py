"""A sharded model is built without memory, cut, and filled one parameter at a time."""

from __future__ import annotations

import json
import re

import pytest

from ppfleetx.config import load_config
from ppfleetx.models.registry import num_parameters
from tests.launch import launch
from tests.training import REPO

#: 205 million parameters, none of them more than 3% of what a rank keeps
LARGE = (
    "Model.vocab_size=12288", "Model.hidden_size=1024", "Model.num_layers=12", "Model.num_attention_heads=16",
    "Model.num_key_value_heads=4", "Model.ffn_hidden_size=4096",
)  # fmt: skip
LAYOUT = (
    "Distributed.mp_degree=2", "Distributed.sharding.sharding_degree=2", "Distributed.sharding.sharding_stage=3"
)  # fmt: skip
ARGUMENTS = ["-c", str(REPO / "configs/debug/tiny_llama.yaml"), "-o", *LARGE]


def test_building_holds_the_shard_and_three_parameters_at_most():
    config = load_config(ARGUMENTS[1:2], LARGE).config
    count = num_parameters(config)
    assert 200e6 < count < 210e6
    result = launch([REPO / "tests/parity/build_worker.py", *ARGUMENTS, *LAYOUT], 4)
    assert result.returncode == 0, result.logs[0][-2000:]
    built = [json.loads(re.search(r"BUILT (.*)", log)[1]) for log in result.logs]
    norms = 4 * 1024 * (2 * 12 + 1)  # which both tensor ranks hold
    assert sum(rank["shard"] for rank in built) == 4 * count + norms
    for rank in built:
        assert rank["unfilled"] < 1e5
        assert rank["shard"] <= rank["held"] <= 1.001 * rank["shard"]
        assert rank["held"] < rank["peak"] <= rank["shard"] + 3 * rank["largest"]
    # N(0, 0.02²) and, in two matrices a block, 0.02²/24: the shards hold initial values, not zeros
    residual = 12 * (1024**2 + 1024 * 4096)
    expected = 0.02**2 * (count - residual + residual / 24) + norms / 4
    norms_twice = norms / 4
    assert sum(rank["squares"] for rank in built) == pytest.approx(expected + norms_twice, rel=0.01)
