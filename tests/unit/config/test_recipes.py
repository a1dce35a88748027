"""Our recipes, PaddleFleetX's own files, and the way back through YAML."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest

from ppfleetx.config import UserError, load_config
from ppfleetx.config.coerce import to_tree
from ppfleetx.config.load import load_tree
from ppfleetx.optim.schedules import build_schedule
from tests.unit.config.helpers import RECIPES, ROOT, config_of, problem_of, write

#: PaddleFleetX's own files (Apache-2.0, licence beside them), which must load unchanged
ORIGINALS = ROOT / "tests/golden/fleetx_yaml"

#: recipe → its own world size, parameters, rows of the embedding
RECIPE_FACTS = {
    "345M_single_card": (1, 354_871_296, 50304),
    "1.3B_dp8": (8, 1_313_722_368, 50304),
    "6.7B_sharding16": (16, 6_654_402_560, 50304),
    "13B_dp8": (16, 12_864_768_000, 50432),
    "175B_mp8_pp16": (128, 174_603_264_000, 51200),
}
OWN_SIZE = {f"pretrain_gpt_{name}.yaml": facts[0] for name, facts in RECIPE_FACTS.items()}
#: of most recipes, as of PaddleFleetX's: the last 140000 updates are made at min_lr
ENDS_EARLY = "Optimizer.lr.decay_steps 360000 is less than Engine.max_steps 500000"
#: how the warnings of a recipe begin
WARNINGS = {
    "345M_single_card": (ENDS_EARLY,),
    "1.3B_dp8": (ENDS_EARLY,),
    "6.7B_sharding16": ("Optimizer.tensor_fusion has no effect", ENDS_EARLY),
    "13B_dp8": ("Optimizer.lr.decay_steps 160000 is less than Engine.max_steps 200000",),
    "175B_mp8_pp16": ("Global.enable_partial_send_recv is False", ENDS_EARLY),
}
#: keys of the originals that have no effect here, so that our recipes leave them out
NO_EFFECT = {"Optimizer.lr.use_increments"}


def leaves(tree, path=""):
    for name, value in tree.items():
        here = f"{path}.{name}" if path else name
        if isinstance(value, dict):
            yield from leaves(value, here)
        else:
            yield here, value


def value_at(config, path):
    for name in path.split("."):
        config = getattr(config, name)
    return config


@pytest.mark.parametrize("name", RECIPE_FACTS)
def test_each_recipe_resolves_at_its_own_world_size(name):
    world_size, parameters, rows = RECIPE_FACTS[name]
    loaded = load_config([str(RECIPES / f"pretrain_gpt_{name}.yaml")], world_size=world_size)
    model, derived = loaded.config.Model, loaded.config.derived
    hidden, ffn = model.hidden_size, derived.ffn_hidden_size
    block = 4 * hidden * hidden + 4 * hidden + 2 * hidden * ffn + ffn + hidden + 4 * hidden
    total = (model.vocab_size + model.max_position_embeddings) * hidden + block * model.num_layers + 2 * hidden
    assert total == parameters  # B20
    assert derived.padded_vocab_size == rows
    assert derived.world_size == world_size and derived.dp_degree * 1 == {"1.3B_dp8": 8}.get(name, 1)
    assert tuple(warning.split(":")[0] for warning in loaded.warnings) == WARNINGS.get(name, ())


def test_13b_uses_128_cards_for_the_8_copies_of_its_name():
    config = load_config([str(RECIPES / "pretrain_gpt_13B_dp8.yaml")], world_size=128).config
    assert config.derived.dp_degree == 8 and config.derived.accumulate_steps == 15


def test_the_base_asks_for_the_model_only():
    with pytest.raises(UserError) as caught:
        load_config([str(RECIPES / "pretrain_gpt_base.yaml")])
    assert {problem.rule.split(":")[0] for problem in caught.value.problems} == {"this key is required"}


def test_the_tiny_recipe_resolves():
    config = load_config([str(ROOT / "configs/debug/tiny_gpt.yaml")]).config
    assert (config.Global.device, config.derived.accumulate_steps, config.derived.num_samples_train) == ("cpu", 4, 240)


@pytest.mark.parametrize(
    ("file", "max_lr"), [("configs/debug/tiny_gpt.yaml", 1e-3), ("projects/gpt/quickstart.yaml", 2e-3)]
)
def test_files_to_play_with_decay_over_the_run_however_long_it_is(file, max_lr):
    """Warm-up 10 of 100 updates, then a cosine: half way down, after 55, the mean of max_lr and min_lr = max_lr / 10."""
    loaded = load_config([str(ROOT / file)], ["Engine.max_steps=100"])
    assert loaded.warnings == () and loaded.config.derived.decay_steps == 100
    schedule = build_schedule(loaded.config.Optimizer.lr, 100)
    found = [schedule(k) for k in (5, 10, 55, 99, 100)]
    last = max_lr * (0.1 + 0.45 * (1 + math.cos(math.pi * 89 / 90)))
    assert found == pytest.approx([max_lr / 2, max_lr, 0.55 * max_lr, last, max_lr / 10], rel=1e-12)


def test_the_overlay_for_laptops_decays_over_its_own_updates():
    """The recipe beneath says 360000."""
    files = [RECIPES / "pretrain_gpt_345M_single_card.yaml", ROOT / "configs/debug/laptop.yaml"]
    loaded = load_config([str(file) for file in files], ["Engine.max_steps=20"])
    assert (loaded.config.derived.decay_steps, loaded.config.derived.warmup_steps, loaded.warnings) == (20, 2.0, ())


def test_every_yaml_file_of_the_repository_is_known_here():
    names = {file.name for file in RECIPES.glob("pretrain_gpt_*.yaml")}
    assert names == {*OWN_SIZE, "pretrain_gpt_base.yaml"}


@pytest.mark.parametrize("file", sorted(ORIGINALS.glob("pretrain_gpt_*.yaml")), ids=lambda file: file.stem)
def test_the_originals_load_unchanged(file):
    overrides = []
    if file.name == "pretrain_gpt_base.yaml":  # what its children add
        overrides = [f"Model.{name}=16" for name in ("vocab_size", "hidden_size", "num_layers", "num_attention_heads")]
    loaded = load_config([str(file)], overrides, world_size=OWN_SIZE.get(file.name, 1))
    assert loaded.config.Optimizer.lr.use_increments is True
    assert loaded.config.Data.Eval is not None and loaded.config.Data.Test is None
    again = load_config([str(file)], overrides, world_size=OWN_SIZE.get(file.name, 1))
    assert again.config == loaded.config


@pytest.mark.parametrize("name", [*OWN_SIZE, "pretrain_gpt_base.yaml"])
def test_our_recipes_have_the_values_of_the_originals(name):
    tree, _ = load_tree([str(ORIGINALS / name)], [])
    more = [f"Model.{key}=16" for key in ("vocab_size", "hidden_size", "num_layers", "num_attention_heads")]
    overrides = more if name == "pretrain_gpt_base.yaml" else []
    size = OWN_SIZE.get(name, 1)
    theirs = load_config([str(ORIGINALS / name)], overrides, world_size=size).config
    ours = load_config([str(RECIPES / name)], overrides, world_size=size).config
    given = [path for path, value in leaves(tree) if value is not None and path not in NO_EFFECT]
    # dp_degree may be left to be derived
    different = {path for path in given if value_at(ours, path) != value_at(theirs, path)} - {"Distributed.dp_degree"}
    assert len(given) > 40 and different == set()
    assert ours.derived == theirs.derived


@pytest.mark.parametrize("file", sorted(ORIGINALS.glob("*.yaml")), ids=lambda file: file.stem)
def test_the_other_originals_are_answered_clearly(file):
    if file.name.startswith("pretrain_gpt"):
        return
    with pytest.raises(UserError) as caught:
        load_config([str(file)])
    assert all(problem.rule for problem in caught.value.problems)


# the way back


def back(config, tmp_path: Path, world_size: int = 1):
    file = write(tmp_path, "resolved.yaml", config.to_yaml())
    return load_config([str(file)], world_size=world_size)


@pytest.mark.parametrize("name", RECIPE_FACTS)
def test_a_resolved_recipe_loads_again_to_the_same(name, tmp_path):
    world_size = RECIPE_FACTS[name][0]
    config = load_config([str(RECIPES / f"pretrain_gpt_{name}.yaml")], world_size=world_size).config
    loaded = back(config, tmp_path, world_size)
    assert loaded.config == config
    lasting = [warning for warning in WARNINGS.get(name, ()) if "False" not in warning]  # what was forced is so already
    assert [warning.split(":")[0] for warning in loaded.warnings] == lasting
    assert loaded.config.to_yaml() == config.to_yaml()


WEIRD = [
    "010", "12:30", "1:30.5", "${x}", "${", "???", "null", "None", "~", "yes", "On", "true", "1e3", "0x10", "1_000",
    "12", "2024-01-31", "=", "<<", "a: b", "a #b", "#a", "- a", "[a", "{a}", "*a", "&a", "!a", "'a'", '"a"', " a ",
    "a\nb", "", "\t", "ü", "\U0001f600", "a" * 300, "a b " * 100, ".inf", ".nan", "\x85", "a\u2028b", "\ufeff", "%a",
    "@a", "`a`", "?", "? a", "a:", ",", "|", ">",
]  # fmt: skip


@pytest.mark.parametrize("text", WEIRD)
def test_any_text_survives_the_way_back(text, tmp_path):
    config = config_of()
    tree = to_tree(config)
    assert tree["Engine"]["save_load"]["output_dir"] == "./output"
    quoted = '"' + text.encode("unicode_escape").decode().replace('"', '\\"') + '"'
    if text == "\U0001f600":
        quoted = f'"{text}"'
    pairs = (f"Engine.save_load.output_dir={quoted}", f"Global.flags={{FLAGS_x: {quoted}, {quoted}: 1}}")
    config = config_of(*pairs, f"Engine.mix_precision.custom_black_list=[{quoted}, {quoted}]")
    assert config.Engine.save_load.output_dir == text and config.Global.flags["FLAGS_x"] == text
    again = back(config, tmp_path).config
    assert again == config and again.to_yaml() == config.to_yaml()


@pytest.mark.parametrize("text", ["1e-8", "1e20", "1.5e-07", "3", "0.1", "123456789.125", "5e-324"])
def test_any_number_survives_the_way_back(text, tmp_path):
    config = config_of(
        f"Optimizer.epsilon={text}", f"Global.flags={{a: {text}, b: -{text}, c: true, d: null, e: .inf}}"
    )
    assert back(config, tmp_path).config == config


def test_forced_and_ignored_values_survive_the_way_back(tmp_path):
    config = config_of(
        "Model.sequence_parallel=true", "Engine.accumulate_steps=3", "Debug.fault={rank: 0, step: 2, kind: hang}",
        "Optimizer.betas=[0.8, 0.9]", "Data.Test.dataset.split.0=9", "Optimizer.grad_clip.clip_norm=0",
        "Model.no_recompute_layers=[2,1,1]",
    )  # fmt: skip
    assert back(config, tmp_path).config == config


def test_derived_values_stand_in_the_yaml_and_are_ignored_on_load(tmp_path):
    text = config_of("Model.no_recompute_layers=[1,0]").to_yaml()
    assert "_derived:\n  world_size: 1\n" in text and "no_recompute_layers: [0, 1]" in text
    changed = text.replace("_derived:\n  world_size: 1", "_derived:\n  world_size: 77\n  nonsense: 1")
    assert load_config([str(write(tmp_path, "a.yaml", changed))]).config.derived.world_size == 1


def test_a_resolved_file_follows_another_world_size(tmp_path):
    assert back(config_of(), tmp_path, world_size=4).config.derived.global_batch_size == 32


def test_quotes_keep_text_from_other_readers_too():
    text = config_of("Engine.save_load.output_dir=010", "Engine.save_load.ckpt_dir=yes").to_yaml()
    assert "output_dir: '010'" in text and "ckpt_dir: 'yes'" in text


def test_sections_are_frozen():
    with pytest.raises(AttributeError):
        config_of().Model.hidden_size = 3


def test_loading_is_fast():
    load_config([str(RECIPES / "pretrain_gpt_175B_mp8_pp16.yaml")], world_size=128)
    best = 9.0
    for _ in range(5):
        start = time.perf_counter()
        load_config([str(RECIPES / "pretrain_gpt_175B_mp8_pp16.yaml")], world_size=128).config.to_yaml()
        best = min(best, time.perf_counter() - start)
    assert best < 0.5


def test_a_recipe_on_too_few_cards_says_how_many_it_wants():
    with pytest.raises(UserError) as caught:
        load_config([str(RECIPES / "pretrain_gpt_175B_mp8_pp16.yaml")], world_size=8)
    (problem,) = caught.value.problems
    assert "world size 8" in problem.rule and "--world-size 128" in problem.fix


def test_a_larger_batch_over_a_recipe_says_to_clear_the_local_one():
    recipe = str(RECIPES / "pretrain_gpt_345M_single_card.yaml")
    with pytest.raises(UserError, match=r"-o Global.local_batch_size=null"):
        load_config([recipe], ["Global.global_batch_size=64"])
    overrides = ["Global.global_batch_size=64", "Global.local_batch_size=null"]
    assert load_config([recipe], overrides).config.derived.accumulate_steps == 8
    assert problem_of("Global.global_batch_size=64").key == "Global.global_batch_size"
