"""Every recipe of the zoo trains on a laptop, by the same code path: laptop.yaml laid over it, degrees cut to the processes."""

from __future__ import annotations

import json

import pytest

from tests.launch import launch
from tests.training import REPO

#: recipe → what is cut
RECIPES = {
    1: {"gpt/pretrain_gpt_345M_single_card": ()},
    2: {
        "gpt/pretrain_gpt_1.3B_dp8": ("Distributed.dp_degree=2",),
        "gpt/pretrain_gpt_6.7B_sharding16": ("Distributed.sharding.sharding_degree=2",),
        "llama/pretrain_llama3_8B_sharding8_stage3": ("Distributed.sharding.sharding_degree=2",),
    },
    4: {
        "gpt/pretrain_gpt_13B_dp8": ("Distributed.mp_degree=2", "Distributed.pp_degree=2"),
        "gpt/pretrain_gpt_175B_mp8_pp16": ("Distributed.mp_degree=2", "Distributed.pp_degree=2"),
        "llama/pretrain_llama3_8B_mp4_sharding2": ("Distributed.mp_degree=2", "Model.num_key_value_heads=2"),
        "llama/pretrain_llama3_70B_mp8_pp8_sharding4": (
            "Distributed.mp_degree=1",
            "Distributed.pp_degree=2",
            "Distributed.sharding.sharding_degree=2",
        ),
    },
}


@pytest.mark.parametrize("nproc", RECIPES)
def test_recipes_train_three_steps(tmp_path, nproc):
    lines = []
    for recipe, cut in RECIPES[nproc].items():
        pairs = [*cut, "Engine.max_steps=3", "Engine.eval_freq=3", f"Engine.save_load.output_dir={tmp_path / recipe}"]
        lines.append(["-c", f"configs/nlp/{recipe}.yaml", "-c", "configs/debug/laptop.yaml", "-o", *pairs])
    result = launch([REPO / "tests/parity/worker.py", json.dumps(lines)], nproc, timeout=200, cwd=REPO)
    assert result.returncode == 0 and result.orphans == 0, result.logs[0][-3000:]
    for recipe in RECIPES[nproc]:
        records = [json.loads(line) for line in (tmp_path / recipe / "metrics.jsonl").read_text().splitlines()]
        losses = [record["loss"] for record in records if record["kind"] == "train"]
        assert len(losses) == 3 and losses[-1] < losses[0], recipe
        assert sum(record["kind"] == "eval" for record in records) == 1
        assert (tmp_path / recipe / "step_00000003" / "manifest.json").is_file()
