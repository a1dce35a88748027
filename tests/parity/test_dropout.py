"""Dropout under layouts: replicated values keep one mask over mp, cut values get their own, recompute changes nothing."""

from __future__ import annotations

import re

import pytest

from ppfleetx.config.layouts import parse_layout
from tests.launch import launch
from tests.training import REPO, same_weights, train_many_on


def test_masks_of_replicated_values_agree_over_mp_and_of_cut_values_differ():
    result = launch([REPO / "tests/parity/dropout_worker.py"], 2, cwd=REPO)
    assert result.returncode == 0, result.logs
    masks = [dict(re.findall(r"MASK (\w+) ([01]+)", log)) for log in result.logs]
    assert masks[0]["global_seed"] == masks[1]["global_seed"]
    assert masks[0]["local_seed"] != masks[1]["local_seed"]
    assert masks[0]["global_seed"] != masks[0]["local_seed"]
    assert all(10 < mask.count("1") < 54 for rank in masks for mask in rank.values())  # 32 ± 5.5σ


@pytest.mark.parametrize(("nproc", "layouts"), [(2, ["mp2", "mp2sp", "pp2", "dp2"]), (4, ["mp2pp2sp"])])
def test_recompute_is_bit_identical_with_dropout(tmp_path, nproc, layouts):
    small = ("Model.num_layers=4", "Model.hidden_size=32", "Engine.max_steps=3", "Global.micro_batch_size=2")
    granularities = ("full", "full_attn", "core_attn") if nproc == 2 else ("full",)
    runs = {}
    for layout in layouts:
        runs[layout] = (*small, *parse_layout(layout).overrides)
        for granularity in granularities if layout in ("mp2sp", "mp2pp2sp") else ("full",):
            more = ("Model.use_recompute=true", f"Model.recompute_granularity={granularity}")
            runs[f"{layout}-{granularity}"] = (*runs[layout], *more)
    outcomes = train_many_on(nproc, runs, tmp_path)
    for name, outcome in outcomes.items():
        assert outcome.code == 0, outcome.launched.logs[0][-2000:]
        plain = outcomes[name.partition("-")[0]]
        assert outcome.losses() == plain.losses() and len(plain.losses()) == 3, name
        assert same_weights(outcome.weights(3), plain.weights(3)), name
