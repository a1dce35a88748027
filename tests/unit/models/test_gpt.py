"""GPT against the NumPy oracle, and what must not change it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import paddle
import pytest

from ppfleetx.config import load_config
from ppfleetx.distributed import Topology, get_rng_state_tracker, seed_streams
from ppfleetx.layers.loss import ParallelCrossEntropy
from ppfleetx.layers.parameter import logical_parameters
from ppfleetx.models import registry
from ppfleetx.models.registry import build_model
from tests.unit.models import numpy_gpt

ROOT = Path(__file__).resolve().parents[3]
TINY = str(ROOT / "configs/debug/tiny_gpt.yaml")
#: odd sizes: 3 heads of 4, 11 tokens padded to 16, 7 positions of which 5 are used
SMALL = [
    "Model.vocab_size=11", "Model.vocab_size_divisible_unit=16", "Model.hidden_size=12", "Model.num_attention_heads=3",
    "Model.num_layers=2", "Model.ffn_hidden_size=20", "Model.max_position_embeddings=7", "Data.Train.dataset.max_seq_len=5",
    "Data.Eval=null", "Model.hidden_dropout_prob=0", "Model.attention_probs_dropout_prob=0",
]  # fmt: skip


def make(*overrides: str, files=(TINY,)):
    """(config, model, parameters by logical name), freshly seeded."""
    paddle.set_device("cpu")
    config = load_config(list(files), list(overrides)).config
    seed_streams(Topology(0, 1), config.Global.seed)
    model = build_model(config, get_rng_state_tracker())
    return config, model, logical_parameters(model)


def run(config, model, ids, labels, mask):
    """Mean loss over the unmasked places; gradients are left in the parameters."""
    criterion = ParallelCrossEntropy(config.Model.vocab_size)
    losses = criterion(model(paddle.to_tensor(ids)), paddle.to_tensor(labels).transpose([1, 0]))
    loss = (losses * paddle.to_tensor(mask).transpose([1, 0])).sum() / float(mask.sum())
    loss.backward()
    return float(loss.item())


@pytest.fixture(scope="module")
def batch():
    random = np.random.default_rng(3)
    ids, labels = random.integers(0, 11, (2, 3, 5))
    mask = (random.random((3, 5)) < 0.7).astype("float32")
    return ids, labels, mask


@pytest.mark.parametrize("fused", ["true", "false"])
def test_loss_and_every_gradient_equal_the_numpy_reference(batch, fused):
    config, model, parameters = make(*SMALL, f"Model.fuse_attn_qkv={fused}")
    random = np.random.default_rng(5)
    for parameter in parameters.values():  # biases and norms away from 0 and 1, everything larger than at the start
        parameter.set_value(random.normal(0.3, 0.5, parameter.shape).astype("float32"))
    loss = run(config, model, *batch)

    fused_weights = {name: parameter.numpy().astype("float64") for name, parameter in parameters.items()}
    weights = numpy_gpt.split_fused(fused_weights, heads=3)
    assert loss == pytest.approx(numpy_gpt.loss(weights, *batch, heads=3, vocab_size=11), rel=2e-6)
    expected = numpy_gpt.gradients(lambda moved: numpy_gpt.loss(moved, *batch, heads=3, vocab_size=11), weights)
    found = numpy_gpt.split_fused({name: p.grad.numpy().astype("float64") for name, p in parameters.items()}, heads=3)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        # a key's bias moves all scores of a row alike, so its true gradient is 0: compare with the scale of its weight
        scale = max(np.linalg.norm(gradient), np.linalg.norm(expected[name.replace("bias", "weight")]))
        assert np.linalg.norm(found[name] - gradient) <= 2e-5 * scale, name


def test_initial_loss_is_ln_vocab_and_does_not_depend_on_padding(batch):
    losses = [run(*make(*SMALL, f"Model.vocab_size_divisible_unit={unit}")[:2], *batch) for unit in (1, 16, 64)]
    assert losses[0] == pytest.approx(math.log(11), abs=0.02)
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-7)


def test_c94_constant_logits_give_ln_256():
    config, model, parameters = make("Model.hidden_dropout_prob=0", "Model.attention_probs_dropout_prob=0")
    for parameter in parameters.values():
        parameter.set_value(paddle.zeros_like(parameter))
    ids = np.random.default_rng(0).integers(0, 256, (2, 32))
    assert run(config, model, ids, ids, np.ones((2, 32), "float32")) == pytest.approx(5.545177444, abs=1e-6)


def test_padding_rows_get_no_gradient(batch):
    config, model, parameters = make(*SMALL)
    run(config, model, *batch)
    word = parameters["embedding.word.weight"]
    assert word.shape[0] == 16 and not word.grad.numpy()[11:].any() and not word.numpy()[11:].any()
    assert word.grad.numpy()[:11].any(axis=1).all()


def test_fused_and_split_start_from_the_same_matrices():
    fused = {name: p.numpy() for name, p in make(*SMALL)[2].items()}
    split = {name: p.numpy() for name, p in make(*SMALL, "Model.fuse_attn_qkv=false")[2].items()}
    unfused = numpy_gpt.split_fused(fused, heads=3)
    assert unfused.keys() == split.keys()
    assert all(np.array_equal(unfused[name], split[name]) for name in split)


def test_initial_values_follow_the_spec():
    config, _, parameters = make("Model.num_layers=8", "Model.initializer_range=0.03")
    for name, parameter in parameters.items():
        values = parameter.numpy()
        if name.endswith("bias"):
            assert not values.any(), name
        elif ".norm" in name or name == "norm.weight":
            assert (values == 1).all(), name
        else:
            # residual outputs: 0.03 / sqrt(2 · 8) = 0.0075
            expected = 0.0075 if name.endswith(("attention.out.weight", "mlp.down.weight")) else 0.03
            assert values.std() == pytest.approx(expected, rel=0.08), name  # 3σ of a sample of 2048: 5 %
            assert abs(values.mean()) < 4 * expected / math.sqrt(values.size), name


@pytest.mark.parametrize("granularity", ["full", "full_attn", "core_attn"])
def test_c52_recompute_is_bit_identical_with_dropout(batch, granularity):
    dropout = ["Model.hidden_dropout_prob=0.2", "Model.attention_probs_dropout_prob=0.3"]
    plain, again = (
        (
            lambda config, model, parameters: (
                run(config, model, *batch),
                {n: p.grad.numpy() for n, p in parameters.items()},
            )
        )(*make(*SMALL, *dropout, *more))
        for more in (
            [],
            ["Model.use_recompute=true", f"Model.recompute_granularity={granularity}", "Model.no_recompute_layers=[1]"],
        )
    )
    assert plain[0] == again[0]
    assert all(np.array_equal(plain[1][name], again[1][name]) for name in plain[1])


def test_scale_qk_by_layer_num_changes_only_rounding(batch):
    on, off = (run(*make(*SMALL, f"Model.scale_qk_by_layer_num={value}")[:2], *batch) for value in ("true", "false"))
    assert on == pytest.approx(off, rel=1e-6)


def test_dropout_is_off_in_evaluation_and_drawn_from_its_streams(batch):
    config, model, _ = make(*SMALL, "Model.hidden_dropout_prob=0.5")
    ids = paddle.to_tensor(batch[0])
    model.eval()
    assert np.array_equal(model(ids).numpy(), model(ids).numpy())
    model.train()
    before = paddle.get_rng_state()[0].__getstate__()
    first, second = model(ids).numpy(), model(ids).numpy()
    assert not np.array_equal(first, second)
    assert paddle.get_rng_state()[0].__getstate__() == before  # the caller's stream did not move


@pytest.mark.parametrize(
    ("recipe", "world_size", "expected"),
    [
        ("345M_single_card", 1, 354_871_296),
        ("1.3B_dp8", 8, 1_313_722_368),
        ("6.7B_sharding16", 16, 6_654_402_560),
        ("13B_dp8", 16, 12_864_768_000),
        ("175B_mp8_pp16", 128, 174_603_264_000),
    ],
)
def test_recipes_have_the_published_number_of_parameters(recipe, world_size, expected):
    file = str(ROOT / f"configs/nlp/gpt/pretrain_gpt_{recipe}.yaml")
    assert registry.num_parameters(load_config([file], [], world_size).config) == expected


def test_b20_small_model_and_flops():
    config = load_config([TINY]).config
    assert registry.num_parameters(config) == 218_496
    # matmul weights: 4 blocks of 12·64² and the head of 256·64, 6 FLOPs each; attention 12·4·64·32
    assert registry.flops_per_token(config, 32) == 6 * (4 * 12 * 64**2 + 256 * 64) + 12 * 4 * 64 * 32


def test_specs_describe_what_the_model_holds():
    config, _, parameters = make(*SMALL)
    specs = {name: one for name, one in registry.parameters(config).items() if not one.tied_to}
    assert specs.keys() == parameters.keys()
    assert all(tuple(parameters[name].shape) == one.shape for name, one in specs.items())
    assert {name for name, one in specs.items() if one.decay} == {n for n, p in parameters.items() if len(p.shape) == 2}
