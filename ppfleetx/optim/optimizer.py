"""Builds Paddle's optimizer from the config, and gives its state logical names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import paddle

from ppfleetx.config import Config

#: Paddle's accumulator suffixes → the name we store them under
_SLOTS = {
    "moment1_0": "moment1",
    "moment2_0": "moment2",
    "beta1_pow_acc_0": "beta1_pow",
    "beta2_pow_acc_0": "beta2_pow",
    "velocity_0": "velocity",
}
MASTER = "master"


def slots_of(name: str) -> frozenset[str]:
    """What the optimizer called `Optimizer.name` keeps for a parameter, master weights apart."""
    if name == "SGD":
        return frozenset()
    return frozenset({"velocity"} if name == "Momentum" else {"moment1", "moment2", "beta1_pow", "beta2_pow"})


def initial_slot(config: Config, slot: str, shape: Sequence[int]) -> paddle.Tensor:
    """What the optimizer of the config begins with: 0, and for the powers of Adam's betas the betas themselves, [1]."""
    if slot in ("beta1_pow", "beta2_pow"):
        return paddle.full([1], getattr(config.derived, slot.removesuffix("_pow")), "float32")
    return paddle.zeros(shape, "float32")


def build_optimizer(config: Config, parameters: Mapping[str, paddle.Tensor]) -> paddle.optimizer.Optimizer:
    """The optimizer of the section `Optimizer`; the learning rate is set by the engine before every update.

    AdamW decays decoupled from the gradient (Loshchilov & Hutter 2019); Adam, Momentum and SGD add weight_decay·w to the
    gradient (L2). Only parameters whose spec says `decay` decay. Clipping is the engine's.

    Args:
        config: the run's configuration.
        parameters: by logical name.
    """
    section, derived = config.Optimizer, config.derived
    every = list(parameters.values())
    common = {"learning_rate": section.lr.max_lr}
    adam = {"beta1": derived.beta1, "beta2": derived.beta2, "epsilon": section.epsilon}
    if section.name in ("AdamW", "FusedAdamW"):
        decayed = {parameter.name for parameter in every if parameter.spec.decay}
        return paddle.optimizer.AdamW(
            parameters=every, weight_decay=section.weight_decay, apply_decay_param_fun=decayed.__contains__,
            multi_precision=derived.multi_precision, **adam, **common,
        )  # fmt: skip
    groups = [
        {"params": [parameter for parameter in every if parameter.spec.decay], "weight_decay": section.weight_decay},
        {"params": [parameter for parameter in every if not parameter.spec.decay], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    common["multi_precision"] = derived.multi_precision
    if section.name == "Adam":
        return paddle.optimizer.Adam(parameters=groups, **adam, **common)
    if section.name == "Momentum":
        return paddle.optimizer.Momentum(parameters=groups, momentum=section.momentum, **common)
    return paddle.optimizer.SGD(parameters=groups, **common)


def optimizer_state(
    optimizer: paddle.optimizer.Optimizer, parameters: Mapping[str, paddle.Tensor]
) -> dict[str, paddle.Tensor]:
    """The optimizer's tensors as `<logical name>.<slot>`; empty before the first update.

    Paddle's own keys begin with `parameter.name`, a counter of this process that no file may hold.
    """
    state = optimizer.state_dict()
    masters = state.get("master_weights", {})
    named = {}
    for logical, parameter in parameters.items():
        for suffix, slot in _SLOTS.items():
            if (key := f"{parameter.name}_{suffix}") in state:
                named[f"{logical}.{slot}"] = state[key]
        if parameter.name in masters:
            named[f"{logical}.{MASTER}"] = masters[parameter.name]
    return named


def load_optimizer_state(
    optimizer: paddle.optimizer.Optimizer, parameters: Mapping[str, paddle.Tensor], named: Mapping[str, paddle.Tensor]
) -> None:
    """Puts back what `optimizer_state` gave; accumulators that do not exist yet are filled when the first update makes them.

    Nothing, or all slots of all parameters: Paddle does not take less.
    """
    state: dict[str, object] = {}
    masters = {}
    for logical, parameter in parameters.items():
        for suffix, slot in _SLOTS.items():
            if (value := named.get(f"{logical}.{slot}")) is not None:
                state[f"{parameter.name}_{suffix}"] = value
        if (value := named.get(f"{logical}.{MASTER}")) is not None:
            masters[parameter.name] = value
    if masters:
        state["master_weights"] = masters
    optimizer.set_state_dict(state)
