"""From a tree to typed sections: types, bounds, choices, unknown keys, all problems at once."""

from __future__ import annotations

import dataclasses

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ppfleetx.config import UserError, load_config
from ppfleetx.config.coerce import build, key_paths, to_tree
from ppfleetx.config.elsewhere import ELSEWHERE
from tests.unit.config.helpers import TINY, config_of, problem_of, problems_of, tiny, write


def value_at(config, path):
    for name in path.split("."):
        config = getattr(config, name)
    return config


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("false", False),
        ("False", False),
        ("true", True),
        ("True", True),
        ("off", False),
        ("'yes'", True),
        ('"True"', True),
    ],
)
def test_c02_lower_case_bools(text, value):
    assert config_of(f"Model.use_recompute={text}").Model.use_recompute is value
    assert config_of(f"Model.use_recompute={text}").derived.recompute_granularity == ("full" if value else None)


@pytest.mark.parametrize("text", ["null", "None", "~", ""])
def test_c02_null_on_the_command_line(text):
    config = config_of("Global.global_batch_size=8", f"Global.global_batch_size={text}")
    assert config.Global.global_batch_size is None
    assert config_of(f"Model.initializer_range={text}").Model.initializer_range == 0.02  # null means the default


def test_c04_numbers_without_a_dot_are_numbers(tmp_path):
    text = "Optimizer:\n  epsilon: 1e-8\n  betas: [9e-1, 9.99e-1]\n  lr: {max_lr: 1e-3, min_lr: '1e-6'}\n"
    optimizer = load_config([str(write(tmp_path, "a.yaml", text))], TINY).config.Optimizer
    values = (optimizer.epsilon, *optimizer.betas, optimizer.lr.max_lr, optimizer.lr.min_lr)
    assert values == (1e-8, 0.9, 0.999, 1e-3, 1e-6)
    assert all(type(value) is float for value in values)


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        ("Optimizer.lr.max_lr", "'2e-5'", 2e-5),
        ("Optimizer.lr.max_lr", "1", 1.0),
        ("Optimizer.lr.max_lr", "' 0.5 '", 0.5),
        ("Engine.max_steps", "1e5", 100000),
        ("Engine.max_steps", "100.0", 100),
        ("Engine.max_steps", "'1e5'", 100000),
        ("Engine.max_steps", "1_000", 1000),
        ("Engine.save_load.output_dir", "2024", "2024"),
        ("Engine.save_load.output_dir", "'2e-5'", "2e-5"),
        ("Engine.mix_precision.custom_black_list", "[]", ()),
        ("Engine.mix_precision.custom_black_list", "[a, b]", ("a", "b")),
        ("Model.no_recompute_layers", "'[0, 1]'", (0, 1)),
        ("Profiler.scheduler", "['1', 5.0]", (1, 5)),
    ],
)
def test_what_fits_a_key(path, text, value):
    got = value_at(config_of(f"{path}={text}"), path)
    assert got == value and type(got) is type(value)


def test_shares_keep_their_kind():
    split = config_of("Data.Train.dataset.split=[0.9, 1, '0.1']").Data.Train.dataset.split
    assert split == (0.9, 1, 0.1) and [type(one) for one in split] == [float, int, float]


@pytest.mark.parametrize(
    ("path", "text", "words"),
    [
        ("Engine.max_steps", "ten", "a whole number is wanted here"),
        ("Engine.max_steps", "010", "a whole number is wanted here"),
        ("Engine.max_steps", "12:30", "a whole number is wanted here"),
        ("Engine.max_steps", "1.5", "a whole number is wanted here"),
        ("Engine.max_steps", "true", "a whole number is wanted here"),
        ("Engine.max_steps", "'None'", "a whole number is wanted here"),
        ("Engine.max_steps", "[1]", "one whole number is wanted here, not a list"),
        ("Engine.max_steps", "{a: 1}", "one whole number is wanted here, not a mapping"),
        ("Engine.max_steps", "1e30", "a number below 2^63 is wanted here"),
        ("Engine.max_steps", "9" * 30, "a number below 2^63 is wanted here"),
        ("Engine.max_steps", "9" * 5000, "a whole number is wanted here"),
        ("Optimizer.lr.max_lr", ".inf", "a finite number is wanted here"),
        ("Optimizer.lr.max_lr", "1e999", "a finite number is wanted here"),
        ("Optimizer.lr.max_lr", "'nan'", "a number is wanted here"),
        ("Optimizer.lr.max_lr", ".nan", "a finite number is wanted here"),
        ("Optimizer.lr.max_lr", "9" * 90, "a number below 2^63 is wanted here"),
        ("Model.use_recompute", "2", "true or false is wanted here"),
        ("Model.use_recompute", "1", "true or false is wanted here"),
        ("Model.use_recompute", "maybe", "true or false is wanted here"),
        ("Engine.save_load.output_dir", "true", "text is wanted here"),
        ("Engine.save_load.output_dir", "1.5", "text is wanted here"),
        ("Engine.save_load.output_dir", "[a]", "one text is wanted here, not a list"),
        ("Data.Train.dataset.split", "5", "a list is wanted here, each item a number"),
        ("Data.Train.dataset.split", "{a: 1}", "a list is wanted here, each item a number"),
        ("Data.Train.dataset.split", "'[1, 2'", "a list is wanted here, each item a number"),
        ("Data.Train.dataset.split", "[1, x, 3]", "a number is wanted here"),
        ("Data.Train.dataset.split", "[1, null, 3]", "a number is wanted here"),
        ("Data.Train.dataset.split", "[1, 2]", "a list of exactly 3 items is wanted here, not 2"),
        ("Global.flags", "5", "a mapping is wanted here"),
        ("Global", "5", "this is a section"),
        ("Data.Train", "[]", "this is a section"),
    ],
)
def test_what_does_not_fit_a_key(path, text, words):
    problem = problem_of(f"{path}={text}")
    assert problem.key == path and words in problem.rule
    assert path in str(problem) and "rule:" in str(problem)


@pytest.mark.parametrize(
    ("path", "text", "words"),
    [
        ("Engine.logging_freq", "0", "must be at least 1"),
        ("Global.seed", "-1", "must be at least 0"),
        ("Model.hidden_dropout_prob", "1", "must be below 1"),
        ("Model.hidden_dropout_prob", "-0.1", "must be at least 0"),
        ("Model.initializer_range", "0", "must be above 0"),
        ("Optimizer.epsilon", "0", "must be above 0"),
        ("Data.Train.dataset.split", "[1, -2, 3]", "must be at least 0"),
        ("Distributed.mp_degree", "0", "must be at least 1"),
        ("Engine.eval_iters", "-1", "must be at least 0"),
        ("Data.Train.loader.num_workers", "1000000", "must be below 257"),
    ],
)
def test_bounds(path, text, words):
    problem = problem_of(f"{path}={text}")
    assert problem.key == path and problem.rule == words


@pytest.mark.parametrize(("level", "stored"), [("o2", "O2"), ("O2", "O2"), ("o1", "O1")])
def test_c60_choices_without_regard_to_case(level, stored):
    config = config_of(f"Engine.mix_precision.level={level}", "Engine.mix_precision.dtype=BFloat16")
    assert config.Engine.mix_precision.level == stored
    assert config.Engine.mix_precision.dtype == "bfloat16"
    assert config == config_of(f"Engine.mix_precision.level={stored}", "Engine.mix_precision.dtype=bfloat16")


@pytest.mark.parametrize(
    ("path", "text", "words"),
    [
        ("Engine.mix_precision.level", "O3", "allowed are O1, O2"),
        ("Engine.mix_precision.dtype", "fp8", "allowed are float16, bfloat16"),
        ("Distributed.sharding.sharding_stage", "4", "allowed are 1, 2, 3"),
        ("Distributed.order", "[dp, pp, sharding, mp, tp]", "allowed are dp, pp, sharding, mp, sep"),
    ],
)
def test_c60_other_values_list_the_allowed_ones(path, text, words):
    assert problem_of(f"{path}={text}").rule == words


def test_c102_an_unknown_device_lists_the_allowed_ones():
    problem = problem_of("Global.device=tpu")
    assert problem.key == "Global.device" and problem.rule == "allowed are gpu, xpu, rocm, npu, cpu, mlu"
    assert config_of("Global.device=CPU").Global.device == "cpu"


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("Model.hiden_size", "Model.hidden_size"),
        ("Model.HIDDEN_SIZE", "Model.hidden_size"),
        ("Global.use_recompute", "Model.use_recompute"),
        ("Distributed.sharding_degree", "Distributed.sharding.sharding_degree"),
        ("Engine.dtype", "Engine.mix_precision.dtype"),
        ("Optimizer.learning_rate", None),
        ("Data.Valid.dataset.max_seq_len", None),
        ("model.hidden_size", "Model"),
        ("Modle.hidden_size", "Model"),
        ("Zebra", None),
        ("Optimizer.grad_clip.clip_nrom", "Optimizer.grad_clip.clip_norm"),
    ],
)
def test_unknown_keys_name_the_nearest(path, near):
    problem = problem_of(f"{path}=64")
    assert problem.rule == "there is no such key"
    assert path.startswith(problem.key)
    if near is not None:
        assert problem.fix == f"did you mean {near}?"
    else:
        assert problem.fix


def test_a_misspelt_required_key_is_one_problem():
    overrides = [pair.replace("hidden_size", "hiden_size") for pair in TINY]
    with pytest.raises(UserError) as caught:
        load_config([], overrides)
    assert [problem.key for problem in caught.value.problems] == ["Model.hiden_size"]


def test_a_misspelt_section_is_one_problem():
    with pytest.raises(UserError) as caught:
        load_config([], [pair.replace("Model.", "model.") for pair in TINY])
    assert [problem.key for problem in caught.value.problems] == ["model"]


def test_a_dotted_key_in_a_file_is_explained(tmp_path):
    with pytest.raises(UserError, match="nested, not joined by a dot"):
        load_config([str(write(tmp_path, "a.yaml", "Global.seed: 5\n"))], TINY)


def test_missing_required_keys_say_what_they_are():
    with pytest.raises(UserError) as caught:
        load_config([], ["Global.local_batch_size=8", "Data.Train.dataset.max_seq_len=32"])
    assert [problem.key for problem in caught.value.problems] == [
        "Model.vocab_size", "Model.hidden_size", "Model.num_layers", "Model.num_attention_heads",
    ]  # fmt: skip
    assert "-o Model.vocab_size=" in caught.value.problems[0].fix


@pytest.mark.parametrize("path", ELSEWHERE)
def test_keys_of_parts_that_are_not_here(path):
    problem = problem_of(f"{path}=1")
    assert problem.key == path and problem.rule == ELSEWHERE[path] and problem.fix == "remove the key"
    for off in ("null", "false", "'False'", "0", "{}", "{enable: False, x: {y: 1}}", "{enable: no, x: 1}", "{a: null}"):
        assert tiny(f"{path}={off}").config == tiny().config


def test_all_problems_come_at_once():
    problems = problems_of(
        "Global.seed=x", "Model.nonsense=1", "Engine.logging_freq=0", "Compress.Quantization.enable=true",
        "Global.micro_batch_size=3", "Model.num_attention_heads=5", "Data.Train.dataset.max_seq_len=2000",
        "Optimizer.lr.min_lr=1", "Debug.fault={rank: 5, step: 1, kind: raise}",
    )  # fmt: skip
    assert {problem.key for problem in problems} == {
        "Global.seed", "Model.nonsense", "Engine.logging_freq", "Compress", "Global.micro_batch_size",
        "Model.num_attention_heads", "Data.Train.dataset.max_seq_len", "Optimizer.lr.min_lr", "Debug.fault.rank",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (
            ("Distributed.mp_degree=x", "Global.global_batch_size=12", "Global.local_batch_size="),
            "Distributed.mp_degree",
        ),
        (("Global.micro_batch_size=x", "Model.virtual_pp_degree=2"), "Global.micro_batch_size"),
        (("Model.num_layers=x", "Distributed.pp_degree=8", "Model.no_recompute_layers=[3]"), "Model.num_layers"),
        (("Model.hidden_size=-64",), "Model.hidden_size"),
        (("Model=5",), "Model"),
        (("Global=5",), "Global"),
        (("Distributed=[]",), "Distributed"),
        (("Engine=x",), "Engine"),
        (("Optimizer=x",), "Optimizer"),
        (("Data=x",), "Data"),
        (
            ("Distributed.dp_degree=3", "Global.global_batch_size=7", "Global.local_batch_size="),
            "Distributed.dp_degree",
        ),
        (
            ("Global.global_batch_size=7", "Global.local_batch_size=", "Global.micro_batch_size=2"),
            "Global.global_batch_size",
        ),
        (("Debug.fault={rank: x, step: 1, kind: raise}",), "Debug.fault.rank"),
    ],
)
def test_one_mistake_is_reported_once(overrides, key):
    """What would follow only from a stand-in for a wrong value is not reported."""
    assert problem_of(*overrides, world_size=8).key == key


def test_a_long_value_is_cut():
    problem = problem_of("Compress=" + "x" * 5000)
    assert len(str(problem)) < 400


def test_the_tree_of_the_sections_builds_the_same_sections():
    config = config_of("Data.Eval.dataset.max_seq_len=16", "Debug.fault={rank: 0, step: 1, kind: exit}")
    tree = to_tree(config)
    tree.pop("derived")
    sections, problems = build(tree)
    assert not problems
    assert all(getattr(sections, field.name) == getattr(config, field.name) for field in dataclasses.fields(sections))


SCALAR = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["[1,2]", "1e3", "None", "${x}", "???", "yes", "O2", "auto"]),
)
NAMES = sorted(
    {part for path in key_paths() for part in path.split(".")} | set(ELSEWHERE) | {"_derived", "_inherited_", "x"}
)
NAME = st.one_of(st.sampled_from(NAMES), st.text(max_size=6))
JUNK = st.recursive(
    SCALAR,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(NAME, inner, max_size=5)),
    max_leaves=25,
)
SECTIONS = st.fixed_dictionaries(
    {},
    optional={
        name: st.one_of(JUNK, st.dictionaries(NAME, JUNK, max_size=6))
        for name in ("Global", "Engine", "Model", "Data", "Optimizer", "Profiler", "Distributed", "Debug", "Compress")
    },
)
QUIET = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@given(tree=st.one_of(SECTIONS, st.dictionaries(NAME, JUNK, max_size=6)), world_size=st.integers(-1, 16))
@QUIET
def test_any_file_loads_or_is_a_users_mistake(tmp_path, tree, world_size):
    file = tmp_path / "junk.yaml"
    file.write_text(yaml.safe_dump(tree, allow_unicode=True), encoding="utf-8")
    for overrides in ((), TINY):
        try:
            load_config([str(file)], overrides, world_size).config.to_yaml()
        except UserError as error:
            assert str(error)


VALUE = st.one_of(SCALAR.map(str), JUNK.map(lambda value: yaml.safe_dump(value, default_flow_style=True)), st.text())
PAIR = st.one_of(st.text(), st.tuples(st.one_of(st.sampled_from(key_paths()), st.text()), VALUE).map("=".join))
INDEX = st.tuples(st.sampled_from(key_paths()), st.one_of(st.integers(-1, 5).map(str), NAME), VALUE).map(
    lambda parts: f"{parts[0]}.{parts[1]}={parts[2]}"
)


@given(pairs=st.lists(st.one_of(PAIR, INDEX), max_size=4), world_size=st.sampled_from([1, 2, 8]))
@QUIET
def test_any_override_loads_or_is_a_users_mistake(pairs, world_size):
    try:
        load_config([], [*TINY, *pairs], world_size).config.to_yaml()
    except UserError as error:
        assert str(error)


@given(st.data())
@QUIET
def test_near_misses_of_real_keys_load_and_come_back_or_are_a_users_mistake(tmp_path, data):
    """Values of the right kind, so that the rules between keys are reached and whole configurations result."""
    numbers = st.sampled_from(["-1", "0", "1", "2", "3", "4", "8", "16", "1e9", "null", "x", "true"])
    paths = [
        path for path in key_paths() if path.count(".") and not path.startswith(("Data.Eval", "Data.Test", "Debug"))
    ]
    pairs = data.draw(st.lists(st.tuples(st.sampled_from(paths), st.one_of(numbers, VALUE)).map("=".join), max_size=4))
    world_size = data.draw(st.sampled_from([1, 2, 4, 8, 16]))
    try:
        config = load_config([], [*TINY, *pairs], world_size).config
    except UserError as error:
        assert str(error)
    else:
        file = write(tmp_path, "resolved.yaml", config.to_yaml())
        assert load_config([str(file)], world_size=world_size).config == config
