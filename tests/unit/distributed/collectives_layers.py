"""Scenes of collectives_worker.py: what Fleet's tensor-parallel and sequence-parallel layers stand on."""

from __future__ import annotations

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.distributed import fleet
from paddle.distributed.fleet.layers.mpu import mp_ops
from paddle.distributed.fleet.meta_parallel import tensor_parallel as fleet_tensor_parallel
from paddle.distributed.fleet.utils import recompute, sequence_parallel_utils

from tests.unit.distributed.collectives_values import draw, refused, same, tensor


def with_gradient(function, values, weights):
    """`function` of a tensor and the gradient of the sum of its results times `weights`."""
    one = tensor(values)
    one.stop_gradient = False
    result = function(one)
    (result * tensor(weights)).sum().backward()
    return result, one.grad


def tensor_parallel(group):
    me, size = group.rank, group.nranks
    whole = [draw([rank, 1], [3, 2 * size]) for rank in group.ranks]
    cuts = [draw([rank, 2], [3, 2]) for rank in group.ranks]
    whole_weights = [draw([rank, 3], [3, 2 * size]) for rank in group.ranks]
    cut_weights = [draw([rank, 4], [3, 2]) for rank in group.ranks]
    columns = slice(2 * me, 2 * me + 2)
    cases = {  # function: input, weights, expected result, expected gradient
        mp_ops._c_identity: (whole[me], whole_weights[me], whole[me], sum(whole_weights)),
        mp_ops._mp_allreduce: (whole[me], whole_weights[me], sum(whole), whole_weights[me]),
        mp_ops._c_split: (whole[me], cut_weights[me], whole[me][:, columns], np.concatenate(cut_weights, -1)),
        mp_ops._c_concat: (cuts[me], whole_weights[me], np.concatenate(cuts, -1), whole_weights[me][:, columns]),
    }
    for function, (values, weights, expected, expected_gradient) in cases.items():
        result, gradient = with_gradient(lambda one, f=function: f(one, group=group), values, weights)
        same(result, expected)
        same(gradient, expected_gradient)
        result, gradient = with_gradient(
            lambda one, f=function: recompute(lambda x: f(x * 1.0, group=group), one), values, weights
        )
        same(result, expected)
        same(gradient, expected_gradient)
        one = tensor(values)
        one.stop_gradient = False
        with paddle.no_grad():
            result = function(one, group=group)
        assert result.stop_gradient
        same(result, expected)
        same(one, values)  # the input stays
    refused(ValueError, ["equal cuts"], mp_ops._c_split, paddle.ones([2, size + 1]), group=group)


def cross_entropy(group):
    me, size = group.rank, group.nranks
    rows, cut = 12, 5
    random = np.random.default_rng(5)
    logits = (random.standard_normal([rows, cut * size]) * 3).astype(np.float32)
    logits[3] += 1000.0  # the maximum must be taken off
    weights = random.standard_normal([rows, 1]).astype(np.float32)
    anywhere = random.integers(0, cut * size, rows)
    anywhere[[1, 7]] = 2  # both the ignored id of the second case and an ordinary one
    never_last = anywhere % (cut * (size - 1))
    for labels, ignored in ((anywhere, -100), (anywhere, 2), (never_last, -100), (np.full(rows, -1), -1)):
        expected, expected_gradient = reference(logits, labels, ignored, weights)
        for shape in ([rows], [rows, 1], [3, 4]):
            width = [*shape[:1], 4] if shape == [3, 4] else [rows]
            mine = tensor(logits[:, cut * me : cut * me + cut].reshape([*width, cut]))
            mine.stop_gradient = False
            label = paddle.to_tensor(labels.reshape(shape))
            loss = mp_ops._c_softmax_with_cross_entropy(mine, label, group=group, ignore_index=ignored)
            assert loss.shape == [*width, 1] and loss.dtype == paddle.float32
            np.testing.assert_allclose(loss.numpy().reshape([rows, 1]), expected, rtol=1e-5, atol=1e-5)
            (loss * tensor(weights.reshape([*width, 1]))).sum().backward()
            gradient = mine.grad.numpy().reshape([rows, cut])
            np.testing.assert_allclose(gradient, expected_gradient[:, cut * me : cut * me + cut], rtol=1e-4, atol=1e-6)
    mine = tensor(logits[:, cut * me : cut * me + cut])
    _, softmax = mp_ops._c_softmax_with_cross_entropy(
        mine, paddle.to_tensor(anywhere), group=group, return_softmax=True
    )
    np.testing.assert_allclose(softmax.numpy(), softmax_of(logits)[:, cut * me : cut * me + cut], rtol=1e-5, atol=1e-7)
    for wrong in (-1, cut * size):
        labels = paddle.full([rows], wrong, "int64")
        refused(ValueError, ["vocabulary"], mp_ops._c_softmax_with_cross_entropy, mine, labels, group=group)
    refused(ValueError, ["shape"], mp_ops._c_softmax_with_cross_entropy, mine, labels[:3], group=group)


def softmax_of(logits):
    shifted = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def reference(logits, labels, ignored, weights):
    """The loss [rows, 1] and the gradient [rows, vocabulary] of its weighted sum, in float64."""
    softmax, counts = softmax_of(logits), (labels != ignored)[:, None]
    picked = np.where(counts[:, 0], labels, 0)
    loss = -np.log(softmax[np.arange(len(labels)), picked])[:, None]
    one_hot = np.eye(logits.shape[-1])[picked]
    return np.where(counts, loss, 0.0), np.where(counts, (softmax - one_hot) * weights, 0.0)


def sequence_parallel(group):
    """Fleet's four operators between [s/n, b, h] and [s, b, h]."""
    me, size = group.rank, group.nranks
    whole = [draw([rank, 5], [2 * size, 3, 2]) for rank in group.ranks]
    cuts = [draw([rank, 6], [2, 3, 2]) for rank in group.ranks]
    rows, total = slice(2 * me, 2 * me + 2), sum(whole)
    cases = [
        (sequence_parallel_utils.ScatterOp, whole[me], cuts[me], whole[me][rows], np.concatenate(cuts)),
        (sequence_parallel_utils.GatherOp, cuts[me], whole[me], np.concatenate(cuts), whole[me][rows]),
        (sequence_parallel_utils.AllGatherOp, cuts[me], whole[me], np.concatenate(cuts), total[rows]),
        (sequence_parallel_utils.ReduceScatterOp, whole[me], cuts[me], total[rows], np.concatenate(cuts)),
    ]
    for operator, values, weights, expected, expected_gradient in cases:
        result, gradient = with_gradient(operator.apply, values, weights)
        same(result, expected)
        same(gradient, expected_gradient)


def broadcast_input(group):
    rank = float(dist.get_rank())
    ids, nested = paddle.full([2, 3], rank, "int64"), {"a": [paddle.full([2], rank)]}
    hybrid = fleet.get_hybrid_communicate_group()
    inputs, named = fleet_tensor_parallel.broadcast_input_data(hybrid, ids, mask=nested)
    assert inputs[0] is ids and named["mask"] is nested
    same(ids, np.full([2, 3], group.ranks[0]))
    same(nested["a"][0], np.full([2], group.ranks[0]))
