"""Resumes from a checkpoint that lacks a part of what a run goes on from, and of runs that train a part of the model."""

from __future__ import annotations

import numpy as np
import pytest

import ppfleetx.engine.step
from ppfleetx.engine.step import make_model
from tests.training import NO_DROPOUT, rewrite, same_weights, train

AUTO = "Engine.save_load.ckpt_dir=auto"
RUN = ("Model.num_layers=2",)
LOOSE = "Engine.save_load.strict=false"
#: leaves the weights as they are
STILL = ("Optimizer.lr.max_lr=0", "Optimizer.lr.min_lr=0")


@pytest.mark.parametrize("part", ["q", "k", "v"])
@pytest.mark.parametrize("fused", ["true", "false"])
def test_query_key_or_value_alone_may_be_missing(tmp_path, part, fused):
    """With `strict: false` it stays as it was initialised, the two others come from the file."""
    before = train(tmp_path, *RUN, "Engine.max_steps=2")
    initial = train(tmp_path / "initial", *RUN, *STILL, "Engine.max_steps=1").weights(1)
    weights, missing = before.weights(2), f"blocks.1.attention.{part}.weight"
    rewrite(before.checkpoint(2), {name: value for name, value in weights.items() if name != missing})
    after = train(tmp_path, *RUN, *STILL, f"Model.fuse_attn_qkv={fused}", LOOSE, "Engine.max_steps=3", AUTO)
    assert after.code == 0
    assert not np.array_equal(initial[missing], weights[missing])
    assert same_weights(after.weights(3), weights | {missing: initial[missing]})


def test_a_checkpoint_without_moments_is_refused(tmp_path, capsys):
    before = train(tmp_path, *RUN, "Engine.max_steps=2")
    rewrite(before.checkpoint(2), before.weights(2))
    assert train(tmp_path, *RUN, "Engine.max_steps=3", AUTO).code == 2
    said = capsys.readouterr().err
    assert "rule: it has no beta1_pow of embedding.word.weight, from which AdamW goes on" in said
    assert "Engine.save_load.strict=false" in said and "weights_only=true" in said
    assert train(tmp_path, *RUN, "Engine.max_steps=3", AUTO, LOOSE).code == 0
    said = capsys.readouterr().out
    assert (
        "optimizer          not restored: AdamW starts anew, the checkpoint lacks beta1_pow, beta2_pow, moment1" in said
    )


@pytest.fixture
def frozen(monkeypatch):
    """Makes runs whose embeddings do not train, until `thawed` is set."""
    switch = {"thawed": False}

    def make(*args):
        model = make_model(*args)
        for parameter in model.parameters():
            parameter.stop_gradient = parameter.spec.name.startswith("embedding") and not switch["thawed"]
        return model

    monkeypatch.setattr(ppfleetx.engine.step, "make_model", make)
    return switch


class TestFrozen:
    def test_two_and_two_updates_are_four_to_the_bit(self, tmp_path, frozen):
        whole = train(tmp_path / "whole", *RUN, "Engine.max_steps=4")
        train(tmp_path / "parts", *RUN, "Engine.max_steps=2")
        parts = train(tmp_path / "parts", *RUN, "Engine.max_steps=4", AUTO)
        assert parts.code == 0 and parts.losses() == whole.losses()
        assert same_weights(parts.tensors(4), whole.tensors(4))
        saved = parts.checkpoint(4)
        assert saved.slots_of("embedding.word.weight") == {""} != saved.slots_of("norm.weight")

    def test_what_is_trained_from_now_on_is_told(self, tmp_path, frozen, capsys):
        train(tmp_path, *RUN, "Engine.max_steps=2")
        frozen["thawed"] = True
        assert train(tmp_path, *RUN, "Engine.max_steps=3", AUTO).code == 2
        assert "it has no beta1_pow of embedding.word.weight" in capsys.readouterr().err
        assert train(tmp_path, *RUN, "Engine.max_steps=3", AUTO, LOOSE).code == 0
        # 36 parameters, of which 2 embeddings have nothing; 4 slots each
        assert (
            "optimizer          136 tensors; none for 2 parameters, embedding.word.weight first"
            in capsys.readouterr().out
        )

    @pytest.mark.parametrize("granularity", ["full", "full_attn", "core_attn"])
    def test_recomputing_gives_all_others_their_gradients(self, tmp_path, frozen, granularity):
        """Without gradients the moments would stay 0."""
        kept = (*RUN, *NO_DROPOUT, "Engine.max_steps=2")
        plain = train(tmp_path / "plain", *kept)
        recomputed = train(
            tmp_path / "again", *kept, "Model.use_recompute=true", f"Model.recompute_granularity={granularity}"
        )
        assert recomputed.losses() == plain.losses()
        assert same_weights(recomputed.tensors(2), plain.tensors(2))
        moments = [value for key, value in recomputed.tensors(2).items() if key.endswith(".moment2")]
        assert len(moments) == 34 and all(value.any() for value in moments)
