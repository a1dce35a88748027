"""Values that follow from others: rules B of config_rules.md in their intended form."""

from __future__ import annotations

import dataclasses

import pytest

from ppfleetx.config.derive import Derived
from tests.unit.config.helpers import config_of, problem_of, tiny

MP2PP2 = ("Distributed.mp_degree=2", "Distributed.pp_degree=2")


def derived_of(*overrides, world_size=1):
    return config_of(*overrides, world_size=world_size).derived


# degrees


@pytest.mark.parametrize(
    ("overrides", "world_size", "dp_degree"),
    [
        ((), 1, 1),
        ((), 8, 8),
        (MP2PP2, 8, 2),
        ((*MP2PP2, "Distributed.dp_degree=null"), 8, 2),
        ((*MP2PP2, "Distributed.sep_degree=2"), 8, 1),
        ((*MP2PP2, "Distributed.sharding.sharding_degree=2"), 8, 1),
        ((*MP2PP2, "Distributed.dp_degree=2"), 8, 2),
    ],
)
def test_b1_c13_dp_degree_is_what_is_left(overrides, world_size, dp_degree):
    assert derived_of(*overrides, world_size=world_size).dp_degree == dp_degree


def test_c13_degrees_that_do_not_multiply_name_the_world_size_and_all_degrees():
    problem = problem_of(*MP2PP2, "Distributed.dp_degree=4", world_size=8)
    assert problem.key == "Distributed.dp_degree" and problem.value == 4
    assert problem.rule == (
        "dp_degree 4 × mp_degree 2 × pp_degree 2 × sharding_degree 1 × sep_degree 1 = 16 must equal the world size 8 "
        "(number of processes)"
    )
    assert problem.fix.startswith("-o Distributed.dp_degree=2, or start 16 processes")


def test_c13_degrees_that_do_not_divide_the_world_size():
    model = ("Model.num_attention_heads=3", "Model.hidden_size=66")
    problem = problem_of(*model, "Distributed.mp_degree=3", world_size=8)
    assert "the world size 8 (number of processes) must be a multiple of mp_degree 3 × pp_degree 1 ×" in problem.rule
    assert problem.fix == "start a multiple of 3 processes (--dry-run: --world-size 3)"
    problem = problem_of(*model, "Distributed.mp_degree=3", "Distributed.dp_degree=2", world_size=8)
    assert "= 6 must equal the world size 8" in problem.rule
    assert problem.fix == "start 6 processes (--dry-run: --world-size 6)"


@pytest.mark.parametrize("world_size", [0, -1])
def test_a_run_has_processes(world_size):
    problem = problem_of(world_size=world_size)
    assert problem.key == "--world-size" and problem.value == world_size


# batch sizes


def sizes_of(total, local, micro=1, *more, world_size=1):
    pairs = [
        f"Global.global_batch_size={total}",
        f"Global.local_batch_size={local}",
        f"Global.micro_batch_size={micro}",
    ]
    derived = derived_of(*pairs, *more, world_size=world_size)
    return derived.global_batch_size, derived.local_batch_size, derived.accumulate_steps


@pytest.mark.parametrize(
    ("total", "local", "micro", "expected"),
    [
        (16, "null", 1, (16, 4, 4)),
        ("null", 4, 2, (16, 4, 2)),
        (16, 4, 4, (16, 4, 1)),
    ],
)
def test_b7_b8_batch_sizes(total, local, micro, expected):
    """4 data ranks: dp 2 × sharding 2."""
    more = ("Distributed.sharding.sharding_degree=2", "Distributed.mp_degree=2")
    assert sizes_of(total, local, micro, *more, world_size=8) == expected


def test_b7_neither_size():
    problem = problem_of("Global.local_batch_size=", "Global.micro_batch_size=2", world_size=4)
    assert problem.key == "Global.global_batch_size" and problem.value is None
    assert problem.rule == "global_batch_size or local_batch_size should be set"
    assert problem.fix == "-o Global.global_batch_size=8"


def test_b7_a_global_size_that_does_not_divide():
    problem = problem_of("Global.global_batch_size=10", "Global.local_batch_size=", world_size=4)
    assert problem.rule == "global_batch_size 10 must be a multiple of dp_degree × sharding_degree = 4"
    assert problem.fix == "-o Global.global_batch_size=12"


def test_b7_two_sizes_that_differ():
    problem = problem_of("Global.global_batch_size=16", "Global.local_batch_size=8", world_size=4)
    assert problem.rule == (
        "global_batch_size 16 must equal local_batch_size 8 × (dp_degree × sharding_degree = 4) = 32"
    )
    assert "-o Global.local_batch_size=null" in problem.fix
    repaired = derived_of("Global.global_batch_size=16", "Global.local_batch_size=null", world_size=4)
    assert repaired.local_batch_size == 4


def test_c10_a_micro_batch_larger_than_the_local_batch():
    sizes = ("Global.global_batch_size=4", "Global.local_batch_size=", "Global.micro_batch_size=4")
    problem = problem_of("Distributed.mp_degree=2", *sizes, world_size=4)
    assert problem.key == "Global.micro_batch_size" and problem.value == 4
    for words in ("global_batch_size 4", "dp_degree × sharding_degree = 2", "local_batch_size 2", "micro_batch_size 4"):
        assert words in problem.rule
    assert problem.fix == "-o Global.micro_batch_size=2"


def test_c12_the_meaning_of_the_sizes():
    derived = derived_of(
        *MP2PP2, "Distributed.sharding.sharding_degree=2", "Distributed.dp_degree=", "Global.local_batch_size=8",
        "Global.micro_batch_size=2", world_size=8,
    )  # fmt: skip
    assert (derived.dp_degree, derived.data_degree) == (1, 2)
    assert (derived.global_batch_size, derived.accumulate_steps) == (16, 4)


def test_b8_an_old_accumulate_steps_is_ignored_with_a_warning():
    loaded = tiny("Engine.accumulate_steps=3", "Global.micro_batch_size=2")
    assert loaded.config.derived.accumulate_steps == 4 and loaded.config.Engine.accumulate_steps is None
    assert loaded.warnings == (
        "Engine.accumulate_steps 3 is ignored: it is local_batch_size 8 ÷ micro_batch_size 2 = 4",
    )
    assert tiny("Engine.accumulate_steps=4", "Global.micro_batch_size=2").warnings == ()


def test_b15_sampler_batch_size_is_null_or_the_local_one():
    assert tiny("Data.Train.sampler.batch_size=8").warnings == ()
    problem = problem_of("Data.Train.sampler.batch_size=4")
    assert problem.key == "Data.Train.sampler.batch_size" and problem.value == 4
    assert problem.rule == "it must equal local_batch_size 8" and problem.fix == "leave it out"


# forced keys


def test_b9_c47_partial_send_and_sequence_parallel():
    loaded = tiny(*MP2PP2, "Model.sequence_parallel=true", world_size=4)
    assert loaded.config.Global.enable_partial_send_recv is False
    assert loaded.warnings == (
        "Global.enable_partial_send_recv is False: with sequence_parallel what one stage sends to the next is already "
        "1/mp of the sequence",
    )
    loaded = tiny(*MP2PP2, "Data.Train.dataset.max_seq_len=33", world_size=4)
    assert loaded.config.Global.enable_partial_send_recv is True and loaded.warnings == ()


def test_b9_only_with_a_pipeline():
    loaded = tiny("Distributed.mp_degree=2", "Model.sequence_parallel=true", world_size=2)
    assert loaded.config.Global.enable_partial_send_recv is True and loaded.warnings == ()


@pytest.mark.parametrize("world_size", [1, 2])
def test_b10_sequence_parallel_without_mp(world_size):
    loaded = tiny("Model.sequence_parallel=true", f"Distributed.pp_degree={world_size}", world_size=world_size)
    assert loaded.config.Model.sequence_parallel is False
    assert loaded.config.Global.enable_partial_send_recv is True
    assert loaded.warnings == ("Model.sequence_parallel is False: it cuts over mp and mp_degree is 1",)


SHARDING2 = ("Distributed.sharding.sharding_degree=2", "Engine.logging_freq=10")


@pytest.mark.parametrize("name", ["reduce_overlap", "broadcast_overlap"])
@pytest.mark.parametrize("cause", ["sharding_stage=3", "sharding_offload=true"])
def test_b5_c51_overlap_with_stage_3_or_offload(name, cause):
    loaded = tiny(*SHARDING2, f"Distributed.sharding.{cause}", f"Distributed.sharding.{name}=true", world_size=2)
    assert getattr(loaded.config.Distributed.sharding, name) is False
    why = "sharding_stage 3" if "stage" in cause else "sharding_offload"
    assert loaded.warnings == (f"Distributed.sharding.{name} is False: it cannot work with {why}",)


def test_b5_c51_broadcast_overlap_and_logging_every_update():
    overrides = ("Distributed.sharding.sharding_degree=2", "Distributed.sharding.broadcast_overlap=true")
    loaded = tiny(*overrides, world_size=2)
    assert loaded.config.Distributed.sharding.broadcast_overlap is False
    assert loaded.warnings == (
        "Distributed.sharding.broadcast_overlap is False: logging_freq 1 waits for every update anyway",
    )
    loaded = tiny(*overrides, "Engine.logging_freq=10", "Distributed.sharding.reduce_overlap=true", world_size=2)
    assert loaded.config.Distributed.sharding.broadcast_overlap is True
    assert loaded.config.Distributed.sharding.reduce_overlap is True and loaded.warnings == ()


def test_b3_sharding_keys_mean_nothing_at_degree_1():
    assert tiny("Distributed.sharding.sharding_stage=3", "Distributed.sharding.broadcast_overlap=true").warnings == ()


@pytest.mark.parametrize("path", ["Distributed.use_main_grad", "Engine.mix_precision.use_main_grad"])
def test_b6_main_grad(path):
    loaded = tiny(f"{path}=true", "Distributed.fuse_sequence_parallel_allreduce=true")
    assert loaded.config.Distributed.fuse_sequence_parallel_allreduce is False
    assert loaded.warnings == (
        "Distributed.fuse_sequence_parallel_allreduce is False: it cannot work with use_main_grad",
    )


O2 = ("Engine.mix_precision.enable=true", "Engine.mix_precision.level=O2")


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        ((), False),  # float32
        ((*O2, "Engine.mix_precision.dtype=bfloat16"), True),  # tiny_gpt adds up 4 micro-batches
        ((*O2, "Engine.mix_precision.dtype=bfloat16", "Global.micro_batch_size=8"), False),
        ((*O2, "Engine.mix_precision.dtype=float16", "Global.micro_batch_size=8"), True),
        (("Engine.mix_precision.enable=true", "Engine.mix_precision.level=O1"), False),
        ((*O2, "Engine.mix_precision.use_main_grad=false"), False),
        ((*O2, "Distributed.use_main_grad=false"), False),
        (("Distributed.use_main_grad=true",), True),
    ],
)
def test_main_gradients_are_on_where_half_precision_sums_would_lose_them(overrides, wanted):
    loaded = tiny(*overrides)
    assert loaded.config.derived.use_main_grad is wanted
    assert f"use_main_grad: {str(wanted).lower()}" in loaded.config.to_yaml().partition("_derived:")[2]


def test_two_words_on_main_gradients_are_refused():
    problem = problem_of("Distributed.use_main_grad=true", "Engine.mix_precision.use_main_grad=false")
    assert problem.key == "Distributed.use_main_grad" and "Engine.mix_precision.use_main_grad False" in problem.rule


def test_comm_overlap_is_an_old_name():
    assert "is an old name and is not read" in tiny("Distributed.sharding.comm_overlap=true").warnings[0]


# model


@pytest.mark.parametrize(
    ("vocab_size", "mp_degree", "padded"),
    [
        (50257, 1, 50304),
        (50257, 2, 50432),
        (50257, 4, 50688),
        (50257, 8, 51200),
        (50304, 1, 50304),
        (50304, 2, 50432),
        (50304, 8, 51200),
        (1, 1, 128),
    ],
)
def test_b19_padded_vocabulary(vocab_size, mp_degree, padded):
    overrides = (f"Model.vocab_size={vocab_size}", f"Distributed.mp_degree={mp_degree}", "Model.num_attention_heads=8")
    assert derived_of(*overrides, world_size=mp_degree).padded_vocab_size == padded


def test_b19_another_unit():
    assert derived_of("Model.vocab_size=50257", "Model.vocab_size_divisible_unit=1").padded_vocab_size == 50257


def test_b16_ffn_hidden_size():
    assert derived_of().ffn_hidden_size == 256
    assert derived_of("Model.ffn_hidden_size=100").ffn_hidden_size == 100


@pytest.mark.parametrize(
    ("overrides", "granularity"),
    [
        (("Model.use_recompute=true",), "full"),
        (("Model.use_recompute=true", "Model.recompute_granularity=core_attn"), "core_attn"),
        (("Model.use_recompute=true", "Model.recompute_granularity=FULL_ATTN"), "full_attn"),
        (("Model.use_recompute=false", "Model.recompute_granularity=full"), None),
        ((), None),
    ],
)
def test_b16_recompute_granularity(overrides, granularity):
    assert derived_of(*overrides).recompute_granularity == granularity


@pytest.mark.parametrize(
    ("text", "value"), [("[4]", "4"), ("[-1]", "-1"), ("['0']", "'0'"), ("[0, 1.5]", "1.5"), ("[true]", "True")]
)
def test_c54_layers_that_are_not_there(text, value):
    problem = problem_of("Model.use_recompute=true", f"Model.no_recompute_layers={text}")
    assert problem.key == "Model.no_recompute_layers"
    assert problem.rule == f"block numbers are whole numbers in 0..3, and {value} is not"


def test_c54_layers_are_sorted_and_each_once():
    derived = derived_of("Model.use_recompute=true", "Model.no_recompute_layers=[1,1,0]")
    assert derived.no_recompute_layers == (0, 1)
    assert derived_of("Model.use_recompute=true").no_recompute_layers == ()


def test_c54_b16_layers_with_a_pipeline_and_full():
    overrides = ("Model.use_recompute=true", "Model.no_recompute_layers=[0]", "Distributed.pp_degree=2")
    problem = problem_of(*overrides, world_size=2)
    assert problem.key == "Model.no_recompute_layers" and problem.value == [0]
    assert problem.rule == "with pp_degree 2 it needs recompute_granularity full_attn or core_attn"
    assert derived_of(*overrides, "Model.recompute_granularity=core_attn", world_size=2).no_recompute_layers == (0,)


# optimizer


def test_betas_in_one_list_or_two_keys():
    assert (derived_of().beta1, derived_of().beta2) == (0.9, 0.999)
    assert derived_of("Optimizer.beta2=0.95").beta2 == 0.95
    derived = derived_of("Optimizer.betas=[0.8, 0.9]")
    assert (derived.beta1, derived.beta2) == (0.8, 0.9)
    assert derived_of("Optimizer.betas=[0.8, 0.9]", "Optimizer.beta1=0.8", "Optimizer.beta2=0.9").beta1 == 0.8
    problem = problem_of("Optimizer.betas=[0.8, 0.9]", "Optimizer.beta2=0.95")
    assert problem.key == "Optimizer.betas" and "beta1 0.9 and beta2 0.95" in problem.rule


def test_b21_multi_precision():
    assert derived_of().multi_precision is False
    assert derived_of("Engine.mix_precision.enable=true").multi_precision is True
    assert derived_of("Engine.mix_precision.enable=true", "Optimizer.multi_precision=true").multi_precision is True
    problem = problem_of("Optimizer.multi_precision=true")
    assert problem.key == "Optimizer.multi_precision" and problem.value is True
    assert problem.rule == "it must equal Engine.mix_precision.enable False"


def test_b23_null_decay_steps_are_the_updates_of_the_run():
    derived = derived_of("Engine.max_steps=200", "Optimizer.lr.warmup_rate=0.1")
    assert (derived.decay_steps, derived.warmup_steps) == (200, 20.0)
    derived = derived_of("Optimizer.lr.decay_steps=50", "Optimizer.lr.warmup_rate=0.01")
    assert (derived.decay_steps, derived.warmup_steps) == (50, 0.5)


@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize("use_increments", ["true", "false"])
def test_b23_c64_the_schedule_counts_updates_whatever_the_batch(size, use_increments):
    derived = derived_of(
        f"Global.local_batch_size={size}", "Optimizer.lr.decay_steps=20", "Optimizer.lr.warmup_rate=0.1",
        f"Optimizer.lr.use_increments={use_increments}",
    )  # fmt: skip
    assert (derived.decay_steps, derived.warmup_steps) == (20, 2.0)


def test_c108_epochs_leave_the_number_of_updates_open():
    derived = derived_of("Engine.run_mode=epoch", "Engine.max_steps=5", "Engine.num_train_epochs=3")
    assert (derived.decay_steps, derived.warmup_steps, derived.num_samples_train) == (None, None, None)
    assert derived_of("Engine.run_mode=epoch", "Engine.max_steps=-1", "Optimizer.lr.decay_steps=9").decay_steps == 9


# counts of samples


EVAL = ("Engine.max_steps=100", "Engine.eval_freq=10", "Engine.eval_iters=5", "Data.Eval.dataset.max_seq_len=32")


def test_b14_numbers_of_samples():
    derived = derived_of(*EVAL, "Data.Test.dataset.max_seq_len=32")
    assert (derived.num_samples_train, derived.num_samples_eval, derived.num_samples_test) == (800, 440, 400)
    assert derived.test_iters == 50


def test_b11_test_iters():
    derived = derived_of(*EVAL, "Engine.test_iters=3", "Data.Test.dataset.max_seq_len=32")
    assert (derived.test_iters, derived.num_samples_test) == (3, 24)


@pytest.mark.parametrize(
    "off",
    ["Engine.eval_freq=0", "Engine.eval_freq=-1", "Engine.eval_freq=null", "Engine.eval_iters=0", "Data.Eval=null"],
)
def test_b14_c93_evaluation_off(off):
    derived = derived_of(*EVAL, off)
    assert (derived.num_samples_train, derived.num_samples_eval) == (800, 0)
    assert min(value for value in dataclasses.astuple(derived) if type(value) is int) >= 0


def test_b14_by_epochs_the_number_is_open():
    derived = derived_of(*EVAL, "Engine.run_mode=epoch")
    assert (derived.num_samples_train, derived.num_samples_eval) == (None, None)
    assert derived_of(*EVAL, "Engine.run_mode=epoch", "Engine.eval_iters=0").num_samples_eval == 0


@pytest.mark.parametrize(("text", "steps"), [("null", None), ("-1", None), ("1000", 1000)])
def test_b12_saves_by_step(text, steps):
    assert derived_of(f"Engine.save_load.save_steps={text}").save_steps == steps


@pytest.mark.parametrize(("text", "epochs"), [("null", 1), ("-1", 1), ("3", 3)])
def test_b12_saves_by_epoch(text, epochs):
    assert derived_of(f"Engine.save_load.save_epoch={text}").save_epoch == epochs


def test_b2_b12_b13_defaults():
    config = config_of()
    engine, layout, sharding = config.Engine, config.Distributed, config.Distributed.sharding
    assert (engine.max_steps, engine.eval_freq, engine.eval_iters, engine.logging_freq) == (500000, -1, 0, 1)
    assert (engine.num_train_epochs, engine.run_mode, engine.max_skipped_steps) == (1, "step", 50)
    assert (engine.save_load.output_dir, engine.save_load.ckpt_dir) == ("./output", None)
    precision = engine.mix_precision
    assert (precision.enable, precision.dtype, precision.level, precision.scale_loss) == (
        False,
        "float16",
        "O2",
        32768.0,
    )
    assert (precision.custom_black_list, precision.custom_white_list) == (None, None)
    assert (layout.mp_degree, layout.pp_degree, layout.sep_degree, layout.pp_recompute_interval) == (1, 1, 1, 1)
    assert (sharding.sharding_degree, sharding.sharding_stage, sharding.sharding_offload) == (1, 2, False)
    assert (sharding.reduce_overlap, sharding.broadcast_overlap) == (False, False)
    assert layout.order == ("dp", "pp", "sharding", "mp", "sep")
    assert config.Optimizer.grad_clip is None  # B26: no block, no clipping


def test_every_derived_value_has_a_reason():
    loaded = tiny(*EVAL)
    filled = {"Model.hidden_dropout_prob", "Model.attention_probs_dropout_prob"}  # keys that differ between families
    assert set(loaded.reasons) == {field.name for field in dataclasses.fields(Derived)} | filled
    assert tiny("Engine.run_mode=epoch").reasons.keys() == loaded.reasons.keys()
