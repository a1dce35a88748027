"""Combinations that cannot work: refused, in terms of the user's keys."""

from __future__ import annotations

import pytest

from ppfleetx.optim.schedules import build_schedule
from tests.unit.config.helpers import config_of, problem_of, problems_of, tiny


def test_c42_b18_heads_that_do_not_divide_the_hidden_size():
    problem = problem_of("Model.hidden_size=64", "Model.num_attention_heads=6")
    assert problem.key == "Model.num_attention_heads" and problem.value == 6
    assert problem.rule == "hidden_size 64 must be a multiple of num_attention_heads 6"


def test_c42_b18_heads_that_mp_does_not_divide():
    problem = problem_of("Model.hidden_size=96", "Model.num_attention_heads=6", "Distributed.mp_degree=4", world_size=4)
    assert problem.rule == "num_attention_heads 6 must be a multiple of mp_degree 4"


def test_b18_heads_over_mp_and_sep():
    overrides = ("Distributed.mp_degree=2", "Distributed.sep_degree=4")
    assert (
        problem_of(*overrides, world_size=8).rule
        == "num_attention_heads 4 must be a multiple of mp_degree 2 × sep_degree 4"
    )


def test_c42_b18_an_ffn_that_mp_does_not_divide():
    problem = problem_of("Model.ffn_hidden_size=250", "Distributed.mp_degree=4", world_size=4)
    assert problem.key == "Model.ffn_hidden_size" and problem.value == 250
    assert problem.rule == "ffn_hidden_size 250 must be a multiple of mp_degree 4"


SEQUENCE_PARALLEL = ("Model.sequence_parallel=true", "Distributed.mp_degree=4")


def test_c57_b10_a_sequence_that_mp_does_not_divide():
    problem = problem_of(*SEQUENCE_PARALLEL, "Data.Train.dataset.max_seq_len=30", world_size=4)
    assert problem.key == "Data.Train.dataset.max_seq_len" and problem.value == 30
    assert problem.rule == "with sequence_parallel max_seq_len 30 must be a multiple of mp_degree 4"
    assert config_of("Distributed.mp_degree=4", "Data.Train.dataset.max_seq_len=30", world_size=4)


def test_a_sequence_is_cut_by_sep_and_then_by_mp():
    overrides = ("Model.num_attention_heads=8", "Distributed.sep_degree=2", *SEQUENCE_PARALLEL)
    problem = problem_of(*overrides, "Data.Train.dataset.max_seq_len=36", world_size=8)
    assert problem.rule == "with sequence_parallel max_seq_len 36 must be a multiple of mp_degree 4 × sep_degree 2"
    assert config_of(*overrides, "Data.Train.dataset.max_seq_len=40", world_size=8)
    problem = problem_of("Distributed.sep_degree=2", "Data.Train.dataset.max_seq_len=33", world_size=2)
    assert problem.rule == "max_seq_len 33 must be a multiple of sep_degree 2"


def test_more_tokens_than_positions():
    problem = problem_of("Model.max_position_embeddings=16")
    assert problem.key == "Data.Train.dataset.max_seq_len"
    assert problem.rule == "max_seq_len 32 must not exceed Model.max_position_embeddings 16"
    problem = problem_of("Data.Eval.dataset.max_seq_len=2048")
    assert problem.key == "Data.Eval.dataset.max_seq_len" and "2048" in problem.rule and "1024" in problem.rule


def test_shares_of_nothing():
    assert problem_of("Data.Train.dataset.split=[0,0,0]").rule == "the sum of the shares must be above 0"


# pipeline


PP4 = ("Distributed.pp_degree=4", "Model.num_layers=8", "Global.micro_batch_size=2")


def test_b17_the_interleaved_schedule():
    loaded = tiny(*PP4, "Model.virtual_pp_degree=2", world_size=4)
    assert loaded.config.Model.virtual_pp_degree == 2 and loaded.warnings == ()


@pytest.mark.parametrize(
    ("overrides", "rule"),
    [
        (("Model.num_layers=12",), "num_layers 12 must be a multiple of virtual_pp_degree 2 × pp_degree 4"),
        (("Global.local_batch_size=12",), "accumulate_steps 6 must be a multiple of pp_degree 4"),
        (("Global.local_batch_size=4",), "accumulate_steps 2 must be a multiple of pp_degree 4"),
    ],
)
def test_b17_what_the_interleaved_schedule_needs(overrides, rule):
    problem = problem_of(*PP4, "Model.virtual_pp_degree=2", *overrides, world_size=4)
    assert problem.key == "Model.virtual_pp_degree" and problem.value == 2 and problem.rule == rule


def test_b17_interleaving_needs_more_than_two_stages():
    problem = problem_of("Distributed.pp_degree=2", "Model.virtual_pp_degree=2", world_size=2)
    assert problem.rule == "the interleaved schedule needs pp_degree above 2, and it is 2"


def test_b17_interleaving_and_stage_3():
    sharding = ("Distributed.sharding.sharding_degree=2", "Distributed.sharding.sharding_stage=3")
    problem = problem_of(*PP4, "Model.virtual_pp_degree=2", *sharding, world_size=8)
    assert "sharding_stage 3" in problem.rule and "virtual_pp_degree 1" in problem.rule
    assert config_of(*PP4, *sharding, world_size=8)


def test_b17_warnings():
    assert tiny("Model.virtual_pp_degree=2").warnings == ("Model.virtual_pp_degree 2 is useless with pp_degree 1",)
    loaded = tiny(*PP4, "Model.num_layers=16", "Model.virtual_pp_degree=4", world_size=4)
    assert loaded.warnings == ("Model.virtual_pp_degree 4: more than 2 rarely pays",)
    loaded = tiny(*PP4, "Model.num_layers=6", world_size=4)
    assert loaded.warnings == ("Model.num_layers 6 is not a multiple of pp_degree 4: stages are uneven",)


def test_b17_fewer_blocks_than_stages():
    problem = problem_of(*PP4, "Model.num_layers=3", world_size=4)
    assert problem.key == "Distributed.pp_degree"
    assert problem.rule == "num_layers 3 is less than pp_degree 4 × virtual_pp_degree 1"


def test_b17_recompute_interval():
    problem = problem_of(*PP4, "Distributed.pp_recompute_interval=3", world_size=4)
    assert problem.key == "Distributed.pp_recompute_interval" and problem.value == 3
    assert problem.rule == "it must not exceed num_layers 8 // (virtual_pp_degree 1 × pp_degree 4) = 2"
    assert config_of(*PP4, "Distributed.pp_recompute_interval=2", world_size=4)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("other", ["mp_degree", "pp_degree"])
def test_b4_c15_every_stage_works_with_mp_and_pp(stage, other):
    overrides = (f"Distributed.{other}=2", "Distributed.sharding.sharding_degree=2")
    warnings = tiny(*overrides, f"Distributed.sharding.sharding_stage={stage}", world_size=4).warnings
    assert [warning.partition(" gathers")[0] for warning in warnings] == (
        ["sharding_stage 3 with pp_degree above 1"] if (stage, other) == (3, "pp_degree") else []
    )


def test_an_order_names_each_axis_once():
    problem = problem_of("Distributed.order=[dp, dp, pp, mp, sep]")
    assert problem.key == "Distributed.order" and "each of dp, pp, sharding, mp, sep" in problem.rule


# optimizer and engine


@pytest.mark.parametrize(
    ("overrides", "world_size"),
    [
        ((), 1),
        ((), 2),
        (("Distributed.sharding.sharding_degree=2",), 2),
        (("Distributed.sharding.sharding_degree=2",), 4),
    ],
)
def test_c110_b22_tensor_fusion_with_dp_and_sharding(overrides, world_size):
    loaded = tiny("Optimizer.tensor_fusion=true", *overrides, world_size=world_size)
    assert loaded.config.Optimizer.tensor_fusion and "tensor_fusion has no effect" in loaded.warnings[0]


@pytest.mark.parametrize("axis", ["mp_degree", "pp_degree", "sep_degree"])
def test_c110_b22_tensor_fusion_and_other_axes(axis):
    problem = problem_of("Optimizer.tensor_fusion=true", f"Distributed.{axis}=2", world_size=2)
    assert problem.key == "Optimizer.tensor_fusion" and problem.value is True
    assert problem.rule == f"tensor_fusion works with dp and sharding only, not with {axis} 2"


def test_learning_rates():
    problem = problem_of("Optimizer.lr.min_lr=1e-3")
    assert problem.rule == "min_lr 0.001 must not exceed max_lr 5e-05"
    assert config_of("Optimizer.lr.min_lr=1e-3", "Optimizer.lr.name=ConstantWithWarmup")
    overrides = ("Optimizer.lr.name=WarmupStableDecay", "Optimizer.lr.warmup_rate=0.5", "Optimizer.lr.decay_rate=0.6")
    assert problem_of(*overrides).rule == "warmup_rate 0.5 + decay_rate 0.6 must not exceed 1"


@pytest.mark.parametrize("name", ["CosineAnnealingWithWarmupDecay", "LinearDecayWithWarmup", "WarmupStableDecay"])
def test_a_rate_that_stays_at_its_lowest_for_the_rest_of_the_run_is_warned_of(name):
    """Update 31 is the first whose rate, `schedule(30)`, is min_lr."""
    common = (f"Optimizer.lr.name={name}", "Optimizer.lr.warmup_rate=0.1", "Engine.max_steps=100")
    loaded = tiny(*common, "Optimizer.lr.decay_steps=30")
    assert loaded.warnings == (
        "Optimizer.lr.decay_steps 30 is less than Engine.max_steps 100: from update 31 on the learning rate stays at "
        "min_lr 1e-05; -o Optimizer.lr.decay_steps=null spreads it over the whole run",
    )
    schedule = build_schedule(loaded.config.Optimizer.lr, 100)
    assert schedule(29) > schedule(30) == schedule(99) == 1e-5
    for decay_steps in ("null", "100", "1000"):  # the last: usual, where a run is a part of a longer one
        assert tiny(*common, f"Optimizer.lr.decay_steps={decay_steps}").warnings == ()


@pytest.mark.parametrize("override", ["lr.name=ConstantWithWarmup", "lr.min_lr=5e-5"])
def test_a_rate_that_does_not_fall_is_not_warned_of(override):
    assert tiny("Engine.max_steps=100", "Optimizer.lr.decay_steps=30", f"Optimizer.{override}").warnings == ()


def test_epochs_tell_only_with_the_data_how_long_the_run_is():
    """There the warning comes from `Engine.fit`."""
    assert tiny("Engine.run_mode=epoch", "Engine.max_steps=100", "Optimizer.lr.decay_steps=30").warnings == ()


@pytest.mark.parametrize("steps", ["0", "-1"])
def test_c108_updates_of_a_run(steps):
    problem = problem_of(f"Engine.max_steps={steps}")
    assert problem.key == "Engine.max_steps" and "at least 1" in problem.rule
    if steps == "-1":
        assert config_of("Engine.max_steps=-1", "Engine.run_mode=epoch").Engine.max_steps == -1


def test_b12_saves():
    problems = problems_of("Engine.save_load.save_steps=0", "Engine.save_load.save_epoch=0")
    assert [problem.key for problem in problems] == ["Engine.save_load.save_epoch", "Engine.save_load.save_steps"]


def test_training_needs_data():
    problem = problem_of("Data.Train=null")
    assert problem.key == "Data.Train" and problem.fix == "-o Data.Train.dataset.input_dir=…"


def test_profiler_range():
    assert problem_of("Profiler.enable=true", "Profiler.scheduler=[5, 5]").key == "Profiler.scheduler"
    assert config_of("Profiler.scheduler=[5, 5]")


def test_fault_on_a_rank_that_is_not_there():
    problem = problem_of("Debug.fault={rank: 2, step: 1, kind: kill}", world_size=2)
    assert problem.key == "Debug.fault.rank" and problem.rule == "ranks of this run are 0..1"
    assert config_of("Debug.fault={rank: 1, step: 1, kind: kill}", world_size=2)


def test_shuffle_warns():
    assert "Data.Train.sampler.shuffle has no further effect" in tiny("Data.Train.sampler.shuffle=true").warnings[0]


def test_an_end_of_document_beyond_the_vocabulary():
    problem = problem_of("Model.vocab_size=256", "Data.Train.dataset.eos_id=256")
    assert problem.key == "Data.Train.dataset.eos_id" and problem.value == 256
    assert problem.rule == "ids must lie in [0, Model.vocab_size = 256)"
    assert config_of("Model.vocab_size=256", "Data.Train.dataset.eos_id=255").Data.Train.dataset.eos_id == 255
