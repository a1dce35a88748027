"""Llama against the NumPy oracle, its rotary frequencies, its numbers."""

from __future__ import annotations

import math

import numpy as np
import paddle
import pytest

from ppfleetx.config import load_config
from ppfleetx.config.schema import RopeScalingConfig
from ppfleetx.layers.attention import AttentionOptions, CoreAttention
from ppfleetx.layers.dropout import CUT, Dropout
from ppfleetx.layers.rotary import Rotary, frequencies
from ppfleetx.models import registry
from tests.unit.models import numpy_gpt, numpy_llama
from tests.unit.models.test_gpt import ROOT, make, run

TINY = str(ROOT / "configs/debug/tiny_llama.yaml")
RECIPES = ROOT / "configs/nlp/llama"
#: odd sizes: 6 query heads of 4 over 2 of keys and values, 11 tokens padded to 16, 5 places
SMALL = [
    "Model.vocab_size=11", "Model.vocab_size_divisible_unit=16", "Model.hidden_size=24", "Model.num_attention_heads=6",
    "Model.num_key_value_heads=2", "Model.num_layers=2", "Model.ffn_hidden_size=10", "Model.max_position_embeddings=7",
    "Model.rope_theta=100", "Model.rope_scaling=null", "Data.Train.dataset.max_seq_len=5", "Data.Eval=null",
]  # fmt: skip


def make_llama(*overrides):
    return make(*SMALL, *overrides, files=(TINY,))


def apart(parameters):
    """Values by logical name, query, key, value, gate and up apart, float64."""
    values = {name: np.asarray(value).astype("float64") for name, value in parameters.items()}
    return numpy_llama.split_fused(values, groups=2, shared=3)


@pytest.fixture(scope="module")
def batch():
    random = np.random.default_rng(3)
    ids, labels = random.integers(0, 11, (2, 3, 5))
    return ids, labels, (random.random((3, 5)) < 0.7).astype("float32")


@pytest.mark.parametrize("overrides", [("Model.fuse_attn_qkv=true",), ("Model.fuse_attn_qkv=false",)])
@pytest.mark.parametrize("tied", ["false", "true"])
def test_loss_and_every_gradient_equal_the_numpy_reference(batch, overrides, tied):
    config, model, parameters = make_llama(*overrides, f"Model.tie_word_embeddings={tied}")
    random = np.random.default_rng(5)
    for parameter in parameters.values():
        parameter.set_value(random.normal(0.3, 0.5, parameter.shape).astype("float32"))
    loss = run(config, model, *batch)

    weights = apart({name: parameter.numpy() for name, parameter in parameters.items()})
    ids, labels, mask = batch

    def oracle(moved):
        return numpy_gpt.mean_loss(numpy_llama.logits(moved, ids, 6, 100.0)[..., :11], labels, mask)

    assert loss == pytest.approx(oracle(weights), rel=2e-6)
    expected = numpy_gpt.gradients(oracle, weights)
    found = apart({name: parameter.grad.numpy() for name, parameter in parameters.items()})
    assert found.keys() == expected.keys() and ("head.weight" in found) == (tied == "false")
    for name, gradient in expected.items():
        assert np.linalg.norm(found[name] - gradient) <= 2e-5 * np.linalg.norm(gradient), name


def test_fused_and_split_start_from_the_same_matrices():
    fused = apart({name: p.numpy() for name, p in make_llama()[2].items()})
    split = apart({name: p.numpy() for name, p in make_llama("Model.fuse_attn_qkv=false")[2].items()})
    assert split["blocks.0.attention.k.weight"].shape == (24, 8)
    assert fused.keys() == split.keys() and all(np.array_equal(fused[name], split[name]) for name in split)


def test_specs_describe_what_the_model_holds():
    config, _, parameters = make_llama()
    specs = registry.parameters(config)
    assert specs.keys() == parameters.keys()
    assert all(tuple(parameters[name].shape) == one.shape for name, one in specs.items())
    assert {name for name, one in specs.items() if one.decay} == {n for n, p in parameters.items() if len(p.shape) == 2}
    assert registry.num_parameters(config) == sum(parameter.size for parameter in parameters.values())


def test_initial_loss_is_ln_vocab(batch):
    assert run(*make_llama()[:2], *batch) == pytest.approx(math.log(11), abs=0.03)


def test_recompute_is_bit_identical_with_dropout(batch):
    dropout = ("Model.hidden_dropout_prob=0.2", "Model.attention_probs_dropout_prob=0.3")
    plain = make_llama(*dropout)
    loss = run(*plain[:2], *batch)
    for granularity in ("full", "full_attn", "core_attn"):
        other = make_llama(*dropout, "Model.use_recompute=true", f"Model.recompute_granularity={granularity}")
        assert run(*other[:2], *batch) == loss
        assert all(np.array_equal(other[2][name].grad.numpy(), p.grad.numpy()) for name, p in plain[2].items())


def test_the_flash_path_gives_the_same_values(batch):
    """Its kernel exists on GPUs; Paddle's operator computes the same on a CPU, sharing heads of keys and values by itself."""
    random = np.random.default_rng(9)
    q, k, v = (paddle.to_tensor(random.normal(size=[5, 3, n, 4]).astype("float32")) for n in (6, 2, 2))
    results = []
    for flash in (False, True):
        options = AttentionOptions(heads=6, kv_heads=2, head_dim=4, flash=flash)
        results.append(CoreAttention(options, Dropout(0.0, CUT, make_llama()[1].chunks[0][0].dropout.tracker))(q, k, v))
    assert np.abs(results[0].numpy() - results[1].numpy()).max() <= 1e-6


def test_rotary_scores_depend_on_distance_only():
    """q at p and k at p − 3 give one score for every p, and norms stay."""
    random = np.random.default_rng(1)
    q, k = (np.broadcast_to(random.normal(size=[1, 1, 1, 8]), [9, 1, 1, 8]).astype("float32") for _ in range(2))
    rotary = Rotary(8, 50.0)
    q, k = (rotary(paddle.to_tensor(one)).numpy()[:, 0, 0] for one in (q, k))
    scores = (q[3:] * k[:-3]).sum(-1)
    assert np.ptp(scores) <= 1e-5 and abs((q[4:] * k[:-4]).sum(-1)[0] - scores[0]) > 1e-2
    assert np.linalg.norm(q, axis=-1) == pytest.approx(np.full(9, np.linalg.norm(q[0])), rel=1e-6)


def test_rotary_frequencies_of_llama_3_1():
    """d 8, θ 10⁴: frequencies 1, 0.1, 0.01, 0.001, which turn 318.3, 31.8, 3.18 and 0.318 times in 2000 places. With low 1 and
    high 4: the first two stay, the last is divided by 8, and the third mixes (3.1831 − 1) / 3 = 0.7277 of itself with 0.2723
    eighths: 0.01 · (0.7277 + 0.2723 / 8) = 0.0076174."""
    assert frequencies(8, 1e4) == pytest.approx([1, 0.1, 0.01, 0.001])
    scaling = RopeScalingConfig(factor=8.0, original_max_position_embeddings=2000)
    assert frequencies(8, 1e4, scaling) == pytest.approx([1, 0.1, 0.0076174, 0.000125], rel=1e-4)


@pytest.mark.parametrize(
    ("recipe", "world_size", "expected"),
    [
        ("8B_mp4_sharding2", 8, 8_030_261_248),
        ("8B_sharding8_stage3", 8, 8_030_261_248),
        ("70B_mp8_pp8_sharding4", 256, 70_553_706_496),
    ],
)
def test_recipes_have_the_published_number_of_parameters(recipe, world_size, expected):
    config = load_config([str(RECIPES / f"pretrain_llama3_{recipe}.yaml")], [], world_size).config
    assert config.derived.padded_vocab_size == config.Model.vocab_size == 128256
    assert registry.num_parameters(config) == expected


def test_number_of_parameters_and_flops_by_hand():
    """A block: norms 2·24; q and out 2·24·24; k and v 2·24·8; gate, up, down 3·24·10. Ends: 2·16·24 and a norm of 24."""
    config = load_config([TINY], SMALL).config
    block = 2 * 24 * 24 + 2 * 24 * 8 + 3 * 24 * 10
    assert registry.num_parameters(config) == 2 * (2 * 24 + block) + 2 * 16 * 24 + 24
    # the embedding is looked up, the head multiplies; attention 12·L·h·s
    assert registry.flops_per_token(config, 5) == 6 * (2 * block + 16 * 24) + 12 * 2 * 24 * 5
