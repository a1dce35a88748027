"""Files, bases, overlays and overrides → one tree."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ppfleetx.config import UserError, load_config
from ppfleetx.config.load import find_path, load_tree
from tests.unit.config.helpers import RECIPES, ROOT, config_of, problem_of, problems_of, tiny, write


def tree_of(*paths, overrides=()):
    return load_tree([str(path) for path in paths], overrides)[0]


def problems_of_files(*paths, overrides=()):
    with pytest.raises(UserError) as caught:
        load_tree([str(path) for path in paths], overrides)
    return caught.value.problems


@pytest.fixture
def chain(tmp_path):
    """Three files in three folders, c ← b ← a."""
    base = "Global:\n  global_batch_size: 8\n  local_batch_size: 1\nOptimizer:\n  lr:\n    name: {}\n    max_lr: 1\n"
    write(tmp_path, "one/two/base.yaml", base.format("LinearDecayWithWarmup"))
    write(tmp_path, "one/middle.yaml", "_base_: ./two/base.yaml\nGlobal:\n  seed: 7\n")
    child = (
        "_base_: ../one/middle.yaml\n"
        "Global:\n  global_batch_size:\n"
        "Optimizer:\n  lr:\n    _inherited_: False\n    name: ConstantWithWarmup\n"
    )
    return write(tmp_path, "other/child.yaml", child)


def test_c08_bases_nulls_and_inherited_false_from_another_folder(chain, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    expected = {
        "Global": {"global_batch_size": None, "local_batch_size": 1, "seed": 7},
        "Optimizer": {"lr": {"name": "ConstantWithWarmup"}},
    }
    assert tree_of(chain) == expected
    assert tree_of(Path("../other/child.yaml")) == expected


def test_c08_a_cleared_global_batch_size_is_derived_from_the_local_one(chain):
    overrides = [f"Model.{name}=4" for name in ("vocab_size", "hidden_size", "num_layers", "num_attention_heads")]
    loaded = load_config([str(chain)], [*overrides, "Data.Train.dataset.max_seq_len=8"], world_size=2)
    assert loaded.config.Global.global_batch_size is None
    assert loaded.config.derived.global_batch_size == 2
    assert loaded.config.Optimizer.lr.max_lr == 5e-5  # the base's 1 was not inherited


@pytest.mark.parametrize("marker", ["False", "false", "no", "'off'"])
def test_inherited_takes_every_form_of_false(tmp_path, marker):
    write(tmp_path, "base.yaml", "Global: {seed: 1, flags: {a: 1}}\nModel: {name: GPT}")
    child = write(tmp_path, "child.yaml", f"_base_: base.yaml\nGlobal:\n  _inherited_: {marker}\n  flags: {{b: 2}}")
    assert tree_of(child) == {"Global": {"flags": {"b": 2}}, "Model": {"name": "GPT"}}


def test_inherited_false_at_the_top_forgets_the_base(tmp_path):
    write(tmp_path, "base.yaml", "Global: {seed: 1}\nModel: {name: GPT}")
    child = write(tmp_path, "child.yaml", "_base_: base.yaml\n_inherited_: false\nGlobal: {device: cpu}")
    tree, origins = load_tree([str(child)], [])
    assert tree == {"Global": {"device": "cpu"}}
    assert list(origins) == ["Global.device"]


def test_inherited_true_and_without_a_base_are_no_keys(tmp_path):
    file = write(tmp_path, "a.yaml", "Global: {_inherited_: true, seed: 1}\nModel: {_inherited_: False, name: GPT}")
    assert tree_of(file) == {"Global": {"seed": 1}, "Model": {"name": "GPT"}}


def test_inherited_must_be_a_bool(tmp_path):
    file = write(tmp_path, "a.yaml", "Global: {_inherited_: 3, seed: 1}")
    (problem,) = problems_of_files(write(tmp_path, "b.yaml", "Global: {seed: 2}"), file)
    assert problem.key == "_inherited_" and problem.value == 3


def test_mappings_merge_and_everything_else_replaces(tmp_path):
    one = write(tmp_path, "1.yaml", "a: {x: 1, y: {z: 1}}\nb: [1, 2, 3]\nc: {d: 1}\ne: [1]\nf: 1\ng: {h: 1}\n")
    two = write(tmp_path, "2.yaml", "a: {y: {w: 2}}\nb: [9]\nc: [1]\ne: {k: 1}\nf: {l: 1}\ng:\n")
    expected = {"a": {"x": 1, "y": {"z": 1, "w": 2}}, "b": [9], "c": [1], "e": {"k": 1}, "f": {"l": 1}, "g": None}
    assert tree_of(one, two) == expected


def test_several_files_and_overrides_are_laid_over_in_order(tmp_path):
    write(tmp_path, "base.yaml", "Global: {seed: 1, device: gpu}")
    one = write(tmp_path, "1.yaml", "_base_: base.yaml\nGlobal: {seed: 2, micro_batch_size: 4}")
    two = write(tmp_path, "2.yaml", "Global: {seed: 3}")
    assert tree_of(one, two)["Global"] == {"seed": 3, "device": "gpu", "micro_batch_size": 4}
    assert tree_of(two, one)["Global"]["seed"] == 2
    assert tree_of(one, two, overrides=["Global.seed=4", "Global.seed=5"])["Global"]["seed"] == 5


def test_an_override_may_go_below_a_null_or_absent_section(tmp_path):
    file = write(tmp_path, "a.yaml", "Global:\n")
    assert tree_of(file, overrides=["Global.seed=5", "Model.name=GPT"]) == {
        "Global": {"seed": 5},
        "Model": {"name": "GPT"},
    }


def test_an_override_with_a_mapping_replaces(tmp_path):
    file = write(tmp_path, "a.yaml", "Global: {seed: 1, device: cpu}")
    tree, origins = load_tree([str(file)], ["Global={seed: 2}"])
    assert tree == {"Global": {"seed": 2}}
    assert "Global.device" not in origins


@pytest.mark.parametrize(
    ("pair", "value"),
    [
        ("Engine.save_load.output_dir=a=b=c", "a=b=c"),
        ("Engine.save_load.output_dir=#c", "#c"),
        ("Engine.save_load.output_dir=${HOME}/x", "${HOME}/x"),
        ("Engine.save_load.output_dir=???", "???"),
        ("Engine.save_load.output_dir=${", "${"),
        ("Engine.save_load.output_dir='${a'", "${a"),
        ("Engine.save_load.output_dir=010", "010"),
        ("Engine.save_load.output_dir=12:30", "12:30"),
        ("Engine.save_load.output_dir=yes", "yes"),
        ("Engine.save_load.output_dir=2024-01-31", "2024-01-31"),
        ("Engine.save_load.output_dir = ./x ", "./x"),
        ("Engine.save_load.output_dir='null'", "null"),
        ('Engine.save_load.output_dir="1e3"', "1e3"),
        ("Engine.save_load.output_dir=!!python/name:os.system", "!!python/name:os.system"),
    ],
)
def test_text_arrives_as_it_was_written(pair, value, tmp_path):
    assert config_of(pair).Engine.save_load.output_dir == value
    text = pair.partition("=")[2]
    if text[:1] not in "#!":  # in a file these begin a comment or a tag
        file = write(tmp_path, "a.yaml", f"Engine:\n  save_load:\n    output_dir: {text.strip()}\n")
        assert tree_of(file)["Engine"]["save_load"]["output_dir"] == value


def test_c07_list_items_by_index():
    assert config_of("Data.Train.dataset.split.0=900").Data.Train.dataset.split == (900, 30, 1)
    assert config_of("Data.Train.dataset.split=[1,2,3]", "Data.Train.dataset.split.2=0").Data.Train.dataset.split == (
        1,
        2,
        0,
    )
    assert config_of("Profiler.scheduler.1=3").Profiler.scheduler == (1, 3)  # no file has a Profiler section
    order = config_of("Distributed.order.0=pp", "Distributed.order.1=dp").Distributed.order
    assert order == ("pp", "dp", "sharding", "mp", "sep")
    recipe = load_config([str(RECIPES / "pretrain_gpt_345M_single_card.yaml")], ["Data.Eval.dataset.split.1=99"]).config
    assert recipe.Data.Eval.dataset.split == (969, 99, 1) and recipe.Data.Train.dataset.split == (969, 30, 1)


@pytest.mark.parametrize("index", ["9", "3", "-1", "x", "²"])
def test_c07_an_index_out_of_range_names_key_index_and_length(index):
    problem = problem_of(f"Data.Train.dataset.split.{index}=1")
    assert problem.key == f"Data.Train.dataset.split.{index}"
    assert "Data.Train.dataset.split is a list of length 3" in problem.rule
    assert f"index {index} is not in 0..2" in problem.rule


def test_an_index_into_an_empty_list():
    problem = problem_of("Engine.mix_precision.custom_black_list.0=x")
    assert problem.rule == "Engine.mix_precision.custom_black_list is a list of length 0; there is no index 0"


@pytest.mark.parametrize(
    "pair", ["Global.seed", "=5", "", ".=1", "Global..seed=1", "Global.=1", "a[0]=1", "[0]=1", "a]=1"]
)
def test_overrides_that_are_no_key_and_value(pair):
    problem = problem_of(pair)
    assert problem.key == "-o" and problem.value == pair and "KEY=VALUE" in problem.rule


def test_an_override_with_bad_yaml_names_key_and_text():
    problem = problem_of("Data.Train.dataset.split=[1, 2")
    assert problem.key == "Data.Train.dataset.split" and problem.value == "[1, 2" and "line 1" in problem.rule


def test_an_override_below_a_value_says_what_is_wanted():
    problem = problem_of("Global.seed=1", "Global.seed.x=1")
    assert problem.key == "Global.seed" and "whole number" in problem.rule


def test_a_missing_file_names_those_that_are_there():
    (problem,) = problems_of_files(RECIPES / "pretrain_gpt_1.4B.yaml")
    assert problem.key == "-c" and problem.value.endswith("1.4B.yaml")
    assert problem.rule == "there is no such file" and "pretrain_gpt_1.3B_dp8.yaml" in problem.fix


def test_a_missing_base_is_named(tmp_path):
    (problem,) = problems_of_files(write(tmp_path, "a.yaml", "_base_: nowhere.yaml"))
    assert problem.key == "_base_" and problem.value.endswith("nowhere.yaml")


@pytest.mark.parametrize("text", ["", "# only a comment\n", "null", "---\n"])
def test_an_empty_file_changes_nothing(tmp_path, text):
    assert tree_of(write(tmp_path, "a.yaml", text)) == {}


@pytest.mark.parametrize("text", ["- a\n- b\n", "just text", "5"])
def test_a_file_that_is_no_mapping(tmp_path, text):
    (problem,) = problems_of_files(write(tmp_path, "a.yaml", text))
    assert problem.rule == "the file must hold a mapping of sections"


def test_a_syntax_error_is_one_line_with_its_place(tmp_path):
    (problem,) = problems_of_files(write(tmp_path, "a.yaml", "Global:\n  seed: 1\n bad: [\n"))
    assert "not valid YAML" in problem.rule and "(line 3, column" in problem.rule and "\n" not in problem.rule


def test_duplicate_keys_in_a_file_are_refused(tmp_path):
    (problem,) = problems_of_files(write(tmp_path, "a.yaml", "Global: {seed: 1}\nModel: {}\nGlobal: {seed: 2}\n"))
    assert "'Global' stands twice (line 3, column 1)" in problem.rule


def test_two_documents_and_bad_bytes_and_folders_are_refused(tmp_path):
    assert "not valid YAML" in problems_of_files(write(tmp_path, "a.yaml", "a: 1\n---\nb: 1\n"))[0].rule
    (tmp_path / "b.yaml").write_bytes(b"a: \xff\xfe")
    assert "not valid YAML" in problems_of_files(tmp_path / "b.yaml")[0].rule
    assert "cannot be read" in problems_of_files(tmp_path)[0].rule
    assert problems_of_files(write(tmp_path, "c.yaml", '_base_: "\\0"'))


def test_a_file_in_a_byte_order_mark_loads(tmp_path):
    assert tree_of(write(tmp_path, "a.yaml", "\ufeffGlobal: {seed: 1}\n")) == {"Global": {"seed": 1}}


def test_python_tags_in_a_file_execute_nothing(tmp_path):
    target = tmp_path / "made"
    file = write(tmp_path, "a.yaml", f"a: !!python/object/apply:os.mkdir ['{target}']\n")
    (problem,) = problems_of_files(file)
    assert "not valid YAML" in problem.rule and not target.exists()


def test_a_cycle_of_bases_names_the_chain(tmp_path):
    write(tmp_path, "a.yaml", "_base_: sub/b.yaml")
    write(tmp_path, "sub/b.yaml", "_base_: ../a.yaml")
    (problem,) = problems_of_files(tmp_path / "a.yaml")
    assert problem.key == "_base_" and "a.yaml" in problem.rule and "b.yaml" in problem.rule
    assert problems_of_files(write(tmp_path, "self.yaml", "_base_: self.yaml"))


def test_a_base_must_be_one_path(tmp_path):
    (problem,) = problems_of_files(write(tmp_path, "a.yaml", "_base_: [x.yaml, y.yaml]"))
    assert "_base_" in problem.key and problem.value == ["x.yaml", "y.yaml"]


def test_problems_of_files_and_overrides_come_together(tmp_path):
    problems = problems_of_files(tmp_path / "no.yaml", tmp_path / "nor.yaml", overrides=["x", "Profiler.scheduler.5=1"])
    assert [problem.key for problem in problems] == ["-c", "-c", "-o", "Profiler.scheduler.5"]


def test_the_older_path_is_looked_up_in_the_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in (
        "ppfleetx/configs/nlp/gpt/pretrain_gpt_base.yaml",
        "./ppfleetx/configs/nlp/gpt/pretrain_gpt_base.yaml",
    ):
        assert find_path(path).samefile(RECIPES / "pretrain_gpt_base.yaml")
        assert tree_of(path)["Model"]["name"] == "GPT"
    assert find_path("ppfleetx/configs/none.yaml") == Path("ppfleetx/configs/none.yaml")
    own = write(tmp_path, "ppfleetx/configs/nlp/gpt/pretrain_gpt_base.yaml", "Model: {name: GPT-cn}")
    assert tree_of(os.path.relpath(own))["Model"]["name"] == "GPT-cn"  # a file that is there wins


def test_the_older_path_works_in_a_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert (ROOT / "ppfleetx/configs").is_symlink()
    assert tree_of("./ppfleetx/configs/nlp/gpt/pretrain_gpt_1.3B_dp8.yaml")["Model"]["hidden_size"] == 2048


def test_keys_of_any_kind_become_text(tmp_path):
    file = write(tmp_path, "a.yaml", "Global:\n  flags: {1: a, true: b, null: c, FLAGS_x.y: d}\n")
    assert tree_of(file)["Global"]["flags"] == {"1": "a", "true": "b", "null": "c", "FLAGS_x.y": "d"}
    assert tiny("Global.flags.FLAGS_benchmark=true").config.Global.flags == {"FLAGS_benchmark": True}


def test_nothing_is_reported_twice():
    assert len(problems_of("Global.seed=x", "Global.seed=y")) == 1
