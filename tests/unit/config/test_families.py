"""Model families: which keys each has, rules of Llama's, and degrees that are `auto`."""

from __future__ import annotations

import pytest

from ppfleetx.config import load_config, nodes_of_launch
from ppfleetx.config.explain import explain
from tests.unit.config.helpers import ROOT, TINY, config_of, problem_of, problems_of, tiny, write

LLAMA = ("Model.name=Llama", "Model.num_attention_heads=8", "Model.num_key_value_heads=2")


def test_a_key_of_another_family_is_refused_by_its_owner():
    problem = problem_of("Model.num_key_value_heads=2")
    assert (problem.key, problem.value) == ("Model.num_key_value_heads", 2)
    assert problem.rule == "only Llama has this key, and Model.name is GPT"
    keys = ("rope_theta=2", "rms_norm_eps=1e-6", "tie_word_embeddings=true", "rope_scaling.factor=2")
    assert {problem.key for problem in problems_of(*(f"Model.{key}" for key in keys))} == {
        f"Model.{key.partition('=')[0].partition('.')[0]}" for key in keys
    }


def test_defaults_of_another_family_do_no_harm():
    """A resolved file holds every key."""
    assert config_of("Model.rope_theta=10000", "Model.tie_word_embeddings=false").Model.name == "GPT"


def test_the_module_goes_with_the_name():
    assert config_of("Model.module=GPTModule") and config_of(*LLAMA, "Model.module=llamamodule")
    problem = problem_of("Model.module=LlamaModule")
    assert problem.key == "Model.module" and problem.rule == "Model.name GPT goes with GPTModule"


def test_a_misspelt_key_of_llama_names_the_nearest():
    problem = problem_of(*LLAMA, "Model.rope_teta=500000")
    assert "did you mean Model.rope_theta?" in problem.fix
    problem = problem_of(*LLAMA, "Model.rope_scaling={factr: 8}")
    assert "did you mean Model.rope_scaling.factor?" in problem.fix


def test_dropout_is_gpts_by_default_and_anyones_by_wish():
    gpt, llama, wished = config_of(), config_of(*LLAMA), config_of(*LLAMA, "Model.hidden_dropout_prob=0.3")
    assert (gpt.Model.hidden_dropout_prob, gpt.Model.attention_probs_dropout_prob) == (0.1, 0.1)
    assert (llama.Model.hidden_dropout_prob, llama.Model.attention_probs_dropout_prob) == (0.0, 0.0)
    assert wished.Model.hidden_dropout_prob == 0.3
    assert "0.0, since that is the family's, Llama" in explain(tiny(*LLAMA), "Model.hidden_dropout_prob")


def test_heads_of_keys_and_values():
    assert config_of().derived.num_key_value_heads == 4 and config_of(*LLAMA).derived.num_key_value_heads == 2
    problem = problem_of(*LLAMA, "Model.num_key_value_heads=3")
    assert problem.rule == "num_attention_heads 8 must be a multiple of num_key_value_heads 3"
    rule = "num_key_value_heads 2 must be a multiple of {}: they are cut over these ranks, never replicated"
    assert problem_of(*LLAMA, "Distributed.mp_degree=4", world_size=4).rule == rule.format("mp_degree 4")
    both = ("Distributed.mp_degree=2", "Distributed.sep_degree=2")
    assert problem_of(*LLAMA, *both, world_size=4).rule == rule.format("mp_degree 2 × sep_degree 2")
    assert config_of(*LLAMA, "Distributed.sep_degree=2", world_size=2)


def test_rotary_needs_pairs_and_a_band():
    problem = problem_of("Model.name=Llama", "Model.hidden_size=60", "Model.num_attention_heads=4")
    assert problem.key == "Model.num_attention_heads" and problem.rule.endswith(
        "60 ÷ num_attention_heads 4 must be even"
    )
    problem = problem_of(*LLAMA, "Model.rope_scaling={low_freq_factor: 4}")
    assert problem.rule == "low_freq_factor 4.0 must be below high_freq_factor 4.0"


def test_the_tiny_llama_resolves_and_loads_again(tmp_path):
    loaded = load_config([str(ROOT / "configs/debug/tiny_llama.yaml")])
    config = loaded.config
    assert (config.Model.num_key_value_heads, config.Model.rope_scaling.factor, loaded.warnings) == (2, 8.0, ())
    assert load_config([str(write(tmp_path, "a.yaml", config.to_yaml()))]).config == config


# auto degrees

AUTO = ("Distributed.mp_degree=auto", "Distributed.sharding.sharding_degree=Auto", "Global.local_batch_size=8")


def degrees(*overrides, world_size, nodes):
    config = load_config([], [*TINY, *AUTO, *overrides], world_size, nodes).config
    layout = config.Distributed
    return layout.mp_degree, layout.sharding.sharding_degree, config.derived.dp_degree


def test_auto_is_the_cards_of_a_node_and_the_number_of_nodes():
    assert degrees(world_size=8, nodes=2) == (4, 2, 1)
    assert degrees(world_size=4, nodes=1) == (4, 1, 1)
    assert degrees(world_size=3, nodes=3) == (1, 3, 1)
    assert degrees(world_size=1, nodes=1) == (1, 1, 1)
    assert degrees("Distributed.mp_degree=2", world_size=8, nodes=2) == (2, 2, 2)


def test_auto_is_a_number_from_then_on(tmp_path):
    loaded = load_config([], [*TINY, *AUTO], 8, 2)
    assert "mp_degree: 4" in loaded.config.to_yaml() and loaded.config.derived.padded_vocab_size == 512
    text = explain(loaded, "Distributed.mp_degree")
    assert "Distributed.mp_degree = 4\n" in text and "'auto'" in text
    assert "forced:  4, since auto is the cards of a node: 8 on 2 node(s)" in text
    assert "forced:  2, since auto is the number of nodes" in explain(loaded, "Distributed.sharding.sharding_degree")


@pytest.mark.parametrize("nodes", [None, 0, 3, 16])
def test_auto_needs_as_many_cards_on_every_node(nodes):
    from ppfleetx.config import UserError

    with pytest.raises(UserError) as caught:
        load_config([], [*TINY, AUTO[0]], 8, nodes)
    assert [problem.key for problem in caught.value.problems] == ["Distributed.mp_degree"]
    assert "as many processes on every node" in caught.value.problems[0].rule


def test_other_words_are_no_degrees():
    assert problem_of("Distributed.mp_degree=all").rule == "a whole number is wanted here"
    assert problem_of("Distributed.pp_degree=auto").rule == "a whole number is wanted here"


def test_nodes_come_from_the_launcher():
    launch = {"PADDLE_TRAINERS_NUM": "8", "PADDLE_NNODES": "2", "PADDLE_LOCAL_SIZE": "4"}
    assert nodes_of_launch(launch) == 2 and nodes_of_launch({}) == 1
    assert nodes_of_launch({**launch, "PADDLE_LOCAL_SIZE": "5"}) is None  # 5 and 3
