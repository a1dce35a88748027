"""Builds Paddle's optimizer from the config, and gives its state logical names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import paddle

from ppfleetx.config import Config

#: what we store → Paddle's name of that accumulator
_ACCUMULATORS = {
    "moment1": "moment1",
    "moment2": "moment2",
    "beta1_pow": "beta1_pow_acc",
    "beta2_pow": "beta2_pow_acc",
    "velocity": "velocity",
}


def slots_of(name: str) -> frozenset[str]:
    """What the optimizer called `Optimizer.name` keeps for a parameter."""
    if name == "SGD":
        return frozenset()
    return frozenset({"velocity"} if name == "Momentum" else {"moment1", "moment2", "beta1_pow", "beta2_pow"})


def build_optimizer(config: Config, parameters: Mapping[str, paddle.Tensor]) -> paddle.optimizer.Optimizer:
    """The optimizer of the section `Optimizer`; the learning rate is set by the engine before every update.

    AdamW decays decoupled from the gradient (Loshchilov & Hutter 2019); Adam, Momentum and SGD add weight_decay·w to the
    gradient (L2). Only parameters whose spec says `decay` decay. Clipping is the engine's.

    Args:
        config: the run's configuration.
        parameters: by logical name, float32; frozen ones are left as they are.
    """
    section, derived = config.Optimizer, config.derived
    every = list(parameters.values())
    common = {"learning_rate": section.lr.max_lr}
    adam = {"beta1": derived.beta1, "beta2": derived.beta2, "epsilon": section.epsilon}
    if section.name in ("AdamW", "FusedAdamW"):
        decayed = {parameter.name for parameter in every if parameter.spec.decay}
        return paddle.optimizer.AdamW(
            parameters=every, weight_decay=section.weight_decay, apply_decay_param_fun=decayed.__contains__,
            **adam, **common,
        )  # fmt: skip
    groups = [
        {"params": [parameter for parameter in every if parameter.spec.decay], "weight_decay": section.weight_decay},
        {"params": [parameter for parameter in every if not parameter.spec.decay], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if section.name == "Adam":
        return paddle.optimizer.Adam(parameters=groups, **adam, **common)
    if section.name == "Momentum":
        return paddle.optimizer.Momentum(parameters=groups, momentum=section.momentum, **common)
    return paddle.optimizer.SGD(parameters=groups, **common)


def optimizer_state(
    optimizer: paddle.optimizer.Optimizer, parameters: Mapping[str, paddle.Tensor]
) -> dict[str, paddle.Tensor]:
    """The optimizer's tensors as `<logical name>.<slot>`, complete also where no update was made yet. Local.

    Paddle (3.3.1) keeps accumulators by kind and then by `parameter.name`, a counter of this process that no file may hold.
    """
    _make_accumulators(optimizer, [one for one in parameters.values() if not one.stop_gradient])
    kept = optimizer._accumulators
    return {
        f"{logical}.{slot}": kept[kind][parameter.name]
        for logical, parameter in parameters.items()
        for slot, kind in _ACCUMULATORS.items()
        if parameter.name in kept.get(kind, {})
    }


def load_optimizer_state(
    optimizer: paddle.optimizer.Optimizer, parameters: Mapping[str, paddle.Tensor], named: Mapping[str, paddle.Tensor]
) -> None:
    """Puts back what `optimizer_state` gave, or a part of it; what is missing begins as in a new run. Local."""
    if not named:  # an evaluation has no use for accumulators
        return
    for key, tensor in optimizer_state(optimizer, parameters).items():
        if key in named:
            tensor.copy_(named[key].reshape(tensor.shape), True)  # set_value would move it to the default device


def _make_accumulators(optimizer: paddle.optimizer.Optimizer, parameters: Sequence[paddle.Tensor]) -> None:
    """What the first update does otherwise, once (Paddle 3.3.1); accumulators lie where the parameters do."""
    device = paddle.get_device()
    if all(parameter.place.is_cpu_place() for parameter in parameters):  # offloaded ones are on the host
        paddle.set_device("cpu")
    try:
        optimizer._create_accumulators(paddle.static.default_main_program().global_block(), list(parameters))
    finally:
        paddle.set_device(device)
