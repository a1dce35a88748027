"""Training in float16 and bfloat16 follows float32 as far as their rounding allows, at every level and with every optimizer.

AdamW's update does not change when all gradients are multiplied by a constant, such as a loss scale that was not taken out
again; so moments are compared too, and SGD is run.
"""

from __future__ import annotations

import pytest

from tests.device.precisions import HALF, SMALL, distances, roundoff
from tests.device.run import train_many
from tests.training import NO_DROPOUT, TINY, same_weights

LLAMA = "configs/debug/tiny_llama.yaml"
OPTIMIZERS = {
    "SGD": ("Optimizer.name=SGD", "Optimizer.lr.max_lr=0.3"),
    "Momentum": ("Optimizer.name=Momentum", "Optimizer.lr.max_lr=0.1"),
    "Adam": ("Optimizer.name=Adam",),
}
#: what the GPT recipes ask for
RECIPE = ("Model.fused_softmax_with_triangular=true", "Model.scale_qk_by_layer_num=true")
PLAIN = ("Model.fused_softmax_with_triangular=false", "Model.scale_qk_by_layer_num=false")
#: what is computed again in the backward pass, with dropout on
GRANULARITIES = {
    "nothing": (),
    "full": ("Model.use_recompute=true",),
    "core_attn": ("Model.use_recompute=true", "Model.recompute_granularity=core_attn"),
}
EVALUATION = ("Engine.eval_freq=2", "Engine.eval_iters=1")


@pytest.fixture(scope="module")
def gpt(tmp_path_factory):
    common = (*SMALL, *NO_DROPOUT)
    levels = {"float32": (), **HALF}
    runs = {name: (*common, *overrides, "Engine.max_steps=20") for name, overrides in levels.items()}
    for optimizer, overrides in OPTIMIZERS.items():
        for name in ("float32", "float16 O2", "bfloat16 O2"):
            runs[f"{optimizer} {name}"] = (*common, *overrides, *levels[name], "Engine.max_steps=6")
    for name in ("float16 O2", "bfloat16 O2"):
        runs[f"plain {name}"] = (*common, *PLAIN, *HALF[name], "Engine.max_steps=6")
        runs[f"recipe {name}"] = (*common, *RECIPE, *HALF[name], "Engine.max_steps=6")
    for name, overrides in HALF.items():
        for granularity in GRANULARITIES:
            recompute = GRANULARITIES[granularity]
            runs[f"{granularity}, {name}"] = (*SMALL, *overrides, *recompute, *EVALUATION, "Engine.max_steps=2")
    return train_many(runs, tmp_path_factory.mktemp("gpt"), TINY)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    runs = {name: (*SMALL, *overrides, "Engine.max_steps=10") for name, overrides in {"float32": (), **HALF}.items()}
    return train_many(runs, tmp_path_factory.mktemp("llama"), LLAMA)


def follows(half, full, kind):
    """A logit of about 1 is rounded once or twice, so the loss of a token is off by about the unit roundoff u, up or down. The
    mean over 256 tokens would be off by u/16 if they were independent; weights and activations are rounded alike for many,
    so u/4 is allowed."""
    assert half.code == 0 and full.code == 0, half.launched.logs[0][-3000:]
    assert half.losses() == pytest.approx(full.losses(), rel=roundoff(kind) / 4)
    assert full.losses()[-1] < full.losses()[0]


def has_the_slots(half, full, kind, step, *slots):
    """What the optimizer keeps is as in float32: a gradient passes some ten matrices, and is rounded at each.

    The loss scale is taken out of float32 gradients at every level: in float16 an element below 2^-14 keeps fewer than 11
    digits, down to none at 2^-25, and the gradients of q and k, about 1e-5 here, would keep 5 to 8.
    """
    allowed = 10 * roundoff(kind)
    for slot in slots:
        found = distances(half.tensors(step), full.tensors(step), slot)
        assert max(found.values()) < allowed, max(found, key=found.get)


@pytest.mark.parametrize("kind", HALF)
class TestHalf:
    def test_gpt_follows_float32(self, gpt, kind):
        follows(gpt[kind], gpt["float32"], kind)

    def test_gpt_has_the_moments_of_float32(self, gpt, kind):
        has_the_slots(gpt[kind], gpt["float32"], kind, 20, "moment1", "moment2")

    def test_llama_follows_float32(self, llama, kind):
        follows(llama[kind], llama["float32"], kind)

    def test_llama_has_the_moments_of_float32(self, llama, kind):
        has_the_slots(llama[kind], llama["float32"], kind, 10, "moment1", "moment2")

    @pytest.mark.parametrize("granularity", ["full", "core_attn"])
    def test_recomputing_changes_no_bit(self, gpt, kind, granularity):
        plain, recomputed = gpt[f"nothing, {kind}"], gpt[f"{granularity}, {kind}"]
        assert recomputed.code == 0, recomputed.launched.logs[0][-3000:]
        assert recomputed.losses() == plain.losses()
        assert [record["loss"] for record in recomputed.records("eval")] == [
            record["loss"] for record in plain.records("eval")
        ]
        assert same_weights(recomputed.weights(2), plain.weights(2))

    def test_it_is_really_half(self, gpt, kind):
        """Losses differ from float32's after a rounding; a checkpoint holds the float32 values that the optimizer updates."""
        assert gpt[kind].losses()[0] != gpt["float32"].losses()[0]
        assert {entry.dtype for entry in gpt[kind].checkpoint(20).manifest.entries} == {"F32"}


@pytest.mark.parametrize("kind", ["float16 O2", "bfloat16 O2"])
class TestMasters:
    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    def test_other_optimizers_follow_float32(self, gpt, kind, optimizer):
        half, full = gpt[f"{optimizer} {kind}"], gpt[f"{optimizer} float32"]
        follows(half, full, kind)
        slots = {"SGD": (), "Momentum": ("velocity",), "Adam": ("moment1", "moment2")}[optimizer]
        has_the_slots(half, full, kind, 6, *slots)

    def test_the_recipes_fused_softmax_and_scaling_change_rounding_only(self, gpt, kind):
        follows(gpt[f"recipe {kind}"], gpt[f"plain {kind}"], kind)
