"""`--explain KEY`."""

from __future__ import annotations

import pytest

from ppfleetx.config import UserError, load_config
from ppfleetx.config.coerce import key_paths
from ppfleetx.config.explain import explain
from tests.unit.config.helpers import TINY, config_of, write


@pytest.fixture
def loaded(tmp_path):
    write(tmp_path, "base.yaml", "Global: {seed: 1}\nData: {Train: {dataset: {split: [90, 9, 1]}}}\n")
    child = "_base_: base.yaml\nGlobal: {seed: 2, flags: {FLAGS_x: 1}}\nModel: {sequence_parallel: true}\n"
    file = write(tmp_path, "child.yaml", child)
    return load_config([str(file)], [*TINY, "Global.seed=3", "Data.Train.dataset.split.0=80"], world_size=2)


def test_base_file_and_override_in_order(loaded):
    lines = explain(loaded, "Global.seed").splitlines()
    assert lines[0] == "Global.seed = 3"
    assert lines[1] == "  meaning: base of every random stream and of the sample order"
    assert lines[2].endswith("base.yaml → 1") and lines[3].endswith("child.yaml → 2")
    assert lines[4:] == ["  set by:  -o Global.seed=3 → 3"]


def test_default(loaded):
    assert explain(loaded, "Engine.logging_freq").splitlines()[2:] == ["  set by:  default"]


def test_derived_by_key_and_by_name(loaded):
    text = explain(loaded, "Distributed.dp_degree")
    assert "Distributed.dp_degree = None" in text and "_derived.dp_degree = 2" in text
    assert "derived: world size 2 ÷ (mp_degree 1 × pp_degree 1 × sharding_degree 1 × sep_degree 1)" in text
    for key in ("padded_vocab_size", "_derived.padded_vocab_size"):
        text = explain(loaded, key)
        assert text.startswith("_derived.padded_vocab_size = 256\n") and "rounded up to a multiple of" in text
    assert "from the launch" in explain(loaded, "world_size")


def test_forced(loaded):
    text = explain(loaded, "Model.sequence_parallel")
    assert text.startswith("Model.sequence_parallel = False\n")
    assert "child.yaml → True" in text
    assert text.endswith("forced:  False, since it cuts over mp and mp_degree is 1")


def test_list_and_list_items(loaded):
    text = explain(loaded, "Data.Train.dataset.split")
    assert text.startswith("Data.Train.dataset.split = [80, 9, 1]\n")
    assert "base.yaml → [90, 9, 1]" in text and "→ 80 (Data.Train.dataset.split.0)" in text
    item = explain(loaded, "Data.Train.dataset.split.1")
    assert (
        item.startswith("Data.Train.dataset.split.1 = 9\n")
        and "base.yaml → [90, 9, 1] (Data.Train.dataset.split)" in item
    )
    assert "split.0" not in item


def test_section_and_flags(loaded):
    assert "-o Model.hidden_size=64 → 64 (Model.hidden_size)" in explain(loaded, "Model")
    assert explain(loaded, "Global.flags.FLAGS_x").startswith("Global.flags.FLAGS_x = 1\n")


def test_what_was_replaced_is_not_named(tmp_path):
    file = write(tmp_path, "a.yaml", "Global: {seed: 1, device: cpu}\nOptimizer: {lr: {max_lr: 1}}")
    over = write(tmp_path, "b.yaml", "Global:\nOptimizer: {lr: {_inherited_: false, min_lr: 0}}")
    loaded = load_config([str(file), str(over)], TINY)
    lines = explain(loaded, "Global.device").splitlines()
    assert lines[0] == "Global.device = 'gpu'" and lines[2].endswith("b.yaml → None (Global)") and len(lines) == 3
    assert "default" in explain(loaded, "Optimizer.lr.max_lr")


@pytest.mark.parametrize(
    ("key", "fix"),
    [
        ("Model.hiden_size", "did you mean Model.hidden_size?"),
        ("", ""),
        ("Data.Train.dataset.split.3", None),
        ("derived", None),
    ],
)
def test_unknown_keys(loaded, key, fix):
    with pytest.raises(UserError) as caught:
        explain(loaded, key)
    (problem,) = caught.value.problems
    assert problem.key == "--explain" and problem.value == key and problem.rule == "there is no such key"
    assert fix is None or problem.fix == fix


def test_a_key_of_a_section_that_is_off(loaded):
    with pytest.raises(UserError, match=r"Data.Test is absent, so what it stands for is off"):
        explain(loaded, "Data.Test.dataset.split")


def test_every_key_can_be_explained(loaded):
    for key in key_paths():
        try:
            assert explain(loaded, key).startswith(f"{key} = ")
        except UserError as error:
            assert "is absent" in str(error)


def test_every_derived_value_can_be_explained(loaded):
    for name in vars(config_of().derived):
        assert f"_derived.{name} = " in explain(loaded, name)
