"""Every optimizer against its formula in NumPy, decay by parameter spec, and its state by logical names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import paddle
import pytest

from ppfleetx.config import load_config
from ppfleetx.layers.spec import ParameterSpec
from ppfleetx.optim.optimizer import build_optimizer, load_optimizer_state, optimizer_state

TINY = str(Path(__file__).resolve().parents[3] / "configs/debug/tiny_gpt.yaml")
RATES = [0.1, 0.05, 0.2]


def parameters():
    """A matrix that decays and a vector that does not, by logical name."""
    random = np.random.default_rng(7)
    made = {}
    for name, shape in (("block.weight", (3, 5)), ("block.bias", (5,))):
        parameter = paddle.create_parameter(list(shape), "float32")
        parameter.set_value(random.normal(size=shape).astype("float32"))
        parameter.spec = ParameterSpec(name=name, shape=shape, decay=len(shape) == 2)
        made[name] = parameter
    return made


def gradients(step):
    random = np.random.default_rng(100 + step)
    return {"block.weight": random.normal(size=(3, 5)), "block.bias": random.normal(size=(5,))}


def run(optimizer, made, steps):
    for step in steps:
        for name, gradient in gradients(step).items():
            made[name].grad = paddle.to_tensor(gradient.astype("float32"))
        optimizer.set_lr(RATES[step])
        optimizer.step()
        optimizer.clear_grad(set_to_zero=False)


def formula(name, weights, steps, decay=0.1, b1=0.8, b2=0.95, eps=1e-6, momentum=0.7):
    """The optimizers as their papers write them, float64."""
    m = {key: np.zeros_like(w) for key, w in weights.items()}
    v = {key: np.zeros_like(w) for key, w in weights.items()}
    for step in steps:
        for key, g in gradients(step).items():
            wd = decay if key.endswith("weight") else 0.0
            if name == "AdamW":
                weights[key] = weights[key] * (1 - RATES[step] * wd)
            else:
                g = g + wd * weights[key]
            if name in ("AdamW", "Adam"):
                m[key] = b1 * m[key] + (1 - b1) * g
                v[key] = b2 * v[key] + (1 - b2) * g * g
                mhat, vhat = m[key] / (1 - b1 ** (step + 1)), v[key] / (1 - b2 ** (step + 1))
                weights[key] = weights[key] - RATES[step] * mhat / (np.sqrt(vhat) + eps)
            elif name == "Momentum":
                m[key] = momentum * m[key] + g
                weights[key] = weights[key] - RATES[step] * m[key]
            else:
                weights[key] = weights[key] - RATES[step] * g
    return weights


def config(name):
    settings = {
        "name": name, "weight_decay": 0.1, "beta1": 0.8, "beta2": 0.95, "epsilon": 1e-6, "momentum": 0.7,
    }  # fmt: skip
    return load_config([TINY], [f"Optimizer.{key}={value}" for key, value in settings.items()]).config


@pytest.mark.parametrize("name", ["AdamW", "FusedAdamW", "Adam", "Momentum", "SGD"])
def test_updates_equal_the_formula(name):
    made = parameters()
    weights = {key: parameter.numpy().astype("float64") for key, parameter in made.items()}
    run(build_optimizer(config(name), made), made, range(3))
    expected = formula(name.removeprefix("Fused"), weights, range(3))
    for key, parameter in made.items():
        assert parameter.numpy() == pytest.approx(expected[key], rel=2e-5, abs=1e-6), key


@pytest.mark.parametrize("name", ["AdamW", "Adam", "Momentum", "SGD"])
def test_state_carries_over_to_a_new_optimizer_bit_for_bit(name):
    straight = parameters()
    run(build_optimizer(config(name), straight), straight, range(3))

    first = parameters()
    optimizer = build_optimizer(config(name), first)
    run(optimizer, first, range(2))
    state = {key: value.clone() for key, value in optimizer_state(optimizer, first).items()}
    second = parameters()
    for key, parameter in second.items():
        parameter.set_value(first[key])
    optimizer = build_optimizer(config(name), second)
    load_optimizer_state(optimizer, second, state)
    run(optimizer, second, [2])
    assert all(np.array_equal(straight[key].numpy(), second[key].numpy()) for key in straight)


def test_state_has_logical_names():
    made = parameters()
    optimizer = build_optimizer(config("AdamW"), made)
    run(optimizer, made, [0])
    slots = ("moment1", "moment2", "beta1_pow", "beta2_pow")
    assert set(optimizer_state(optimizer, made)) == {f"{name}.{slot}" for name in made for slot in slots}


def test_state_is_complete_before_the_first_update():
    """A checkpoint after float16 skipped every update so far must not lack what a resume needs."""
    made = parameters()
    state = optimizer_state(build_optimizer(config("AdamW"), made), made)
    assert len(state) == 4 * len(made)
    for key, value in state.items():
        initial = {"beta1_pow": 0.8, "beta2_pow": 0.95}.get(key.rpartition(".")[2], 0.0)
        assert (value.numpy() == np.float32(initial)).all(), key


def test_a_part_of_the_state_may_be_loaded():
    made = parameters()
    optimizer, one = build_optimizer(config("AdamW"), made), next(iter(made))
    load_optimizer_state(optimizer, made, {f"{one}.moment1": paddle.full_like(made[one], 3.0)})
    state = optimizer_state(optimizer, made)
    assert (state[f"{one}.moment1"].numpy() == 3).all()
    assert all(
        (value.numpy() == 0).all() for key, value in state.items() if "moment" in key and key != f"{one}.moment1"
    )
