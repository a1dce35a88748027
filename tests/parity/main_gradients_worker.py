"""What each of the 4 processes of test_main_gradients.py runs: bfloat16 sums over ranks, and whole runs with and without
float32 masters. Prints one line for each that held."""

from __future__ import annotations

import os

import numpy as np
import paddle
from paddle import nn

import ppfleetx.engine.step as step
from ppfleetx.config.layouts import parse_layout
from ppfleetx.distributed import ParallelContext, Topology
from ppfleetx.distributed.trainable import Dtypes, WholeParameters
from ppfleetx.layers.spec import ParameterSpec
from tests.parity.sharding_worker import run
from tests.parity.test_main_gradients import LAYOUTS, SMALL

RANK, WORLD = int(os.environ["PADDLE_TRAINER_ID"]), int(os.environ["PADDLE_TRAINERS_NUM"])
TINY = 2.0**-9


def sums(axis, sequence_parallel=False):
    """Gradients of this layout's reduction, where rank r gave 1 (r = 0) or 2⁻⁹ to each parameter; `cut` is cut over mp, `tied`
    stands at both ends."""
    context = ParallelContext.create(Topology(RANK, WORLD, **{f"{axis}_degree": WORLD}), "cpu")
    layers = {"cut": nn.Linear(5, 3), "tied": nn.Linear(5, 3), "whole": nn.Linear(5, 3)}
    named = {}
    for name, layer in layers.items():
        named[name] = layer.weight
        layer.weight.spec = ParameterSpec(
            name=name, shape=(5, 3), mp_dim=0 if name == "cut" else None, at_both_ends=name == "tied"
        )
    trainable = WholeParameters(context, named, sequence_parallel, Dtypes("bfloat16", "float32", main_gradients=True))
    for layer in layers.values():
        (layer.weight.astype("float32") * (1.0 if RANK == 0 else TINY)).sum().backward()
    trainable.reduce()
    found = {name: np.unique(master.grad.numpy()).tolist() for name, master in trainable.named.items()}
    context.close()
    return found


def reduced_in_float32():
    """1 + 2⁻⁹ and 1 + 3 · 2⁻⁹ are no bfloat16 numbers."""
    own = [1.0 if RANK == 0 else TINY]
    everybody = [1 + 3 * TINY]
    assert sums("dp") == dict.fromkeys(("cut", "tied", "whole"), everybody)
    assert sums("sep") == dict.fromkeys(("cut", "tied", "whole"), everybody)
    assert sums("mp") == dict.fromkeys(("cut", "tied", "whole"), own)
    assert sums("mp", sequence_parallel=True) == {"cut": own, "tied": everybody, "whole": everybody}
    ends = [1 + TINY] if RANK in (0, WORLD - 1) else own
    assert sums("pp") == {"cut": own, "tied": ends, "whole": own}


def with_masters(overrides):
    """A run whose model keeps a copy of float32 masters, whatever the config says."""
    step.Dtypes = lambda compute, reduce, main_gradients: Dtypes(compute, reduce, True)
    try:
        return run(overrides)
    finally:
        step.Dtypes = Dtypes


def same_run(layout):
    overrides = (*SMALL, *parse_layout(layout).overrides, f"Global.micro_batch_size={LAYOUTS[layout]}")
    plain, found = run(overrides), with_masters(overrides)
    assert plain["losses"] == found["losses"] and len(plain["losses"]) == 3, (plain["losses"], found["losses"])
    assert plain["grad_norms"] == found["grad_norms"], (plain["grad_norms"], found["grad_norms"])
    for one, other in zip(plain["pieces"], found["pieces"], strict=True):
        assert one[:4] == other[:4] and np.array_equal(one[4], other[4]), one[0]


paddle.set_device("cpu")
reduced_in_float32()
print("sums held", flush=True)
for name in LAYOUTS:
    same_run(name)
    print(f"{name} held", flush=True)
