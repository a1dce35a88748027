"""What each of the 2 processes of test_linear.py runs: linear layers in both forms of tensor parallelism, and the loss; odd
sizes."""

from __future__ import annotations

import itertools
import os
from functools import partial

import numpy as np
import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
from paddle.base import core
from paddle.distributed.fleet.utils import recompute

from ppfleetx.distributed import ParallelContext, Topology, get_rng_state_tracker
from ppfleetx.layers.edges import Edges
from ppfleetx.layers.linear import ColumnParallelLinear
from ppfleetx.layers.loss import IGNORE_INDEX, ParallelCrossEntropy
from ppfleetx.layers.parameter import ParameterMaker
from ppfleetx.layers.spec import ParameterSpec
from tests.unit.layers.test_loss import oracle as cross_entropy

RANK, WORLD = int(os.environ["PADDLE_TRAINER_ID"]), int(os.environ["PADDLE_TRAINERS_NUM"])
S, B, IN, OUT = 14, 3, 5, 22  # out and, with sequence parallel, s are cut in two


def layer_and_input(sequence_parallel, s=S, width=IN):
    edges = Edges(CONTEXT.group("mp"), sequence_parallel)
    specs = {
        "layer.weight": ParameterSpec(name="layer.weight", shape=(width, OUT), mp_dim=1, std=1.0),
        "layer.bias": ParameterSpec(name="layer.bias", shape=(OUT,), mp_dim=0, std=1.0),
    }
    layer = ColumnParallelLinear("layer", ParameterMaker(specs, get_rng_state_tracker(), edges))
    x = np.random.default_rng(2).normal(size=[s, B, width]).astype("float32")
    if sequence_parallel:
        x = x[s // WORLD * RANK : s // WORLD * (RANK + 1)]
    return layer, paddle.to_tensor(x, stop_gradient=False)


def gradients(forward, layer, x):
    """(y, dx, dW, db) of a forward pass and the backward pass of a fixed dY."""
    y = forward(x)
    dy = np.random.default_rng(3 + RANK).normal(size=y.shape).astype("float32")
    y.backward(paddle.to_tensor(dy))
    inputs = [x, layer.weight, *([] if layer.bias is None else [layer.bias])]
    found = [y.numpy(), *(None if tensor.grad is None else tensor.grad.numpy() for tensor in inputs)]
    for tensor in inputs:
        tensor.clear_gradient(False)
    return found if layer.bias is not None else [*found, None]


def the_numbers_of_edge_and_linear():
    """To the bit, plain and recomputed, with and without a bias."""
    for sequence_parallel, with_bias in itertools.product((False, True), repeat=2):
        layer, x = layer_and_input(sequence_parallel)
        if not with_bias:
            layer.bias = None
        right = gradients(partial(enter_and_multiply, layer), layer, x)
        for forward in (layer, partial(recompute, layer)):
            for one, other in zip(gradients(forward, layer, x), right, strict=True):
                assert one is other is None or np.array_equal(one, other)
        assert [one is None for one in right] == [False, False, False, not with_bias]
        assert right[1].shape == tuple(x.shape) and np.abs(right[1]).min() > 0


def enter_and_multiply(layer, x):
    return F.linear(layer.edges.enter(x), layer.weight, layer.bias)


def frozen_parts():
    """What is frozen has no gradient, the rest the same."""
    for sequence_parallel in (False, True):
        layer, x = layer_and_input(sequence_parallel)
        right = gradients(layer, layer, x)
        for number, frozen in enumerate((x, layer.weight, layer.bias), start=1):
            frozen.stop_gradient = True
            found = gradients(layer, layer, x)
            frozen.stop_gradient = False
            assert found[number] is None
            found[number] = right[number]
            assert all(np.array_equal(one, other) for one, other in zip(found, right, strict=True))


def communication_runs_beside_dw():
    """The order of the calls in the backward pass; `wait` is what a GPU's computation waits in."""
    calls = []

    def noting(owner, name, label):
        original = getattr(owner, name)

        def call(*args, **kwargs):
            overlaps = kwargs.get("sync_op") is False
            calls.append(label if label == "matmul" else f"{label}{' beside' if overlaps else ''}")
            result = original(*args, **kwargs)
            if overlaps:
                return type("Task", (), {"wait": lambda self: calls.append(f"wait for {label}")})()
            return result

        setattr(owner, name, call)
        return lambda: setattr(owner, name, original)

    expected = {
        False: ["matmul", "sum beside", "matmul", "matmul", "wait for sum"],  # dx; dW and db
        True: ["gather beside", "matmul", "scatter beside", "wait for gather", "matmul", "matmul", "wait for scatter"],
    }
    for sequence_parallel, order in expected.items():
        layer, x = layer_and_input(sequence_parallel)
        loss = layer(x).sum()
        undo = [noting(paddle, "matmul", "matmul")]
        pairs = {"all_reduce": "sum", "all_gather": "gather", "reduce_scatter": "scatter"}
        undo += [noting(dist.stream, name, label) for name, label in pairs.items()]
        calls.clear()
        loss.backward()
        assert calls == order, calls
        for each in undo:
            each()


def only_the_local_part_is_kept():
    """With sequence parallel a layer keeps 1/mp of its input: y, and nothing that is as large as the whole input."""
    layer, x = layer_and_input(True, s=400, width=300)
    before = core.host_memory_stat_current_value("Allocated", 0)
    y = layer(x)
    kept = core.host_memory_stat_current_value("Allocated", 0) - before
    whole = 400 * B * 300 * 4
    assert kept < y.size * 4 + whole / 4, (kept, y.size * 4, whole)
    y.sum().backward()


def the_loss_over_a_cut_vocabulary():
    """Each rank has half of the columns; of 11 tokens padded to 12, of 3 padded to 12 (rank 1 has padding only), and of 12."""
    for tokens in (11, 3, 12):
        random = np.random.default_rng(tokens)
        labels = random.integers(0, tokens, [S, B])
        labels[1, 2] = IGNORE_INDEX
        weights = random.normal(size=[S, B]).astype("float32")
        for scale in (1.0, 60.0):
            logits = (random.normal(size=[S, B, 12]) * scale).astype("float32")
            own = logits[..., 6 * RANK : 6 * RANK + 6]
            tensor = paddle.to_tensor(own, stop_gradient=False)
            losses = ParallelCrossEntropy(tokens, Edges(CONTEXT.group("mp")))(tensor, paddle.to_tensor(labels))
            (losses * paddle.to_tensor(weights)).sum().backward()
            right, gradient = cross_entropy(logits[..., :tokens], labels, weights)
            gradient = np.concatenate([gradient, np.zeros([S, B, 12 - tokens])], -1)
            np.testing.assert_allclose(losses.numpy(), right, rtol=1e-6, atol=1e-6)
            found = tensor.grad.numpy()
            np.testing.assert_allclose(found, gradient[..., 6 * RANK : 6 * RANK + 6], rtol=1e-5, atol=1e-6)
        labels[0, 0] = tokens
        try:
            ParallelCrossEntropy(tokens, Edges(CONTEXT.group("mp")))(tensor, paddle.to_tensor(labels))
        except ValueError as error:
            assert f"labels must lie in 0..{tokens - 1} or be -100, and {tokens} is there" in str(error)
        else:
            raise AssertionError("the label was taken")


paddle.set_device("cpu")
CONTEXT = ParallelContext.create(Topology(RANK, WORLD, mp_degree=WORLD), "cpu")
get_rng_state_tracker().set_init_seed(7)
for scene in (
    the_numbers_of_edge_and_linear,
    frozen_parts,
    communication_runs_beside_dw,
    only_the_local_part_is_kept,
    the_loss_over_a_cut_vocabulary,
):
    scene()
    print(scene.__name__, "held", flush=True)
CONTEXT.close()
