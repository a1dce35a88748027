"""What each process of test_collectives_gloo.py runs: every collective against NumPy, on the world and on parts of it.

Values are small integers, so that every dtype holds every result exactly, and results are compared exactly.
"""

from __future__ import annotations

import os
import time

import numpy as np
import paddle
import paddle.distributed as dist

from ppfleetx.distributed import ParallelContext, Topology
from tests.unit.distributed.collectives_layers import broadcast_input, cross_entropy, sequence_parallel, tensor_parallel
from tests.unit.distributed.collectives_messages import a_lost_message, messages
from tests.unit.distributed.collectives_values import DTYPES, FLOATS, draw, refused, same, tensor

RANK, WORLD = int(os.environ["PADDLE_TRAINER_ID"]), int(os.environ["PADDLE_TRAINERS_NUM"])

OPS = {"SUM": np.sum, "MAX": np.max, "MIN": np.min, "PROD": np.prod}


def dtypes(group):
    """All dtypes on the world; on its parts one that travels as it is, one of each other kind, and booleans."""
    return DTYPES if group.nranks == WORLD else ["float32", "float16", "int16", "bool"]


def streams(dtype):
    """The options of both ways to call; on the calculation stream one dtype shows that the method is there."""
    return [{}, {"sync_op": True, "use_calc_stream": True}] if dtype == "float16" else [{}]


def reductions(group):
    everyone, me = group.ranks, group.rank
    for dtype in dtypes(group):
        for name, oracle in OPS.items():
            op = getattr(dist.ReduceOp, name)
            for shape in ([5], [2, 3], [], [0, 3]):
                inputs = [draw(rank, shape, dtype) for rank in everyone]
                expected = oracle(inputs, axis=0)
                expected = (expected != 0).astype(float) if dtype == "bool" else expected
                for options in streams(dtype):
                    one = tensor(inputs[me], dtype)
                    dist.stream.all_reduce(one, op=op, group=group, **options)
                    assert one.dtype == getattr(paddle, dtype) and one.shape == shape
                    same(one, expected)
                    destination = len(everyone) - 1
                    one = tensor(inputs[me], dtype)
                    dist.stream.reduce(one, dst=everyone[destination], op=op, group=group, **options)
                    if me == destination:
                        same(one, expected)
        average(group, dtype)
    halves(group)


def average(group, dtype):
    inputs = [draw(rank, [group.nranks], dtype) for rank in group.ranks]
    mean = np.mean(inputs, axis=0)
    for call in (dist.all_reduce, dist.stream.all_reduce):
        one = tensor(inputs[group.rank], dtype)
        if dtype in FLOATS:
            call(one, op=dist.ReduceOp.AVG, group=group)
            same(one, tensor(mean, dtype).astype("float64").numpy())  # rounded once
        else:
            refused(TypeError, ["all_reduce", dtype], call, one, op=dist.ReduceOp.AVG, group=group)
    one, out = tensor(inputs[group.rank], dtype), tensor([0], dtype)
    if dtype in FLOATS:
        dist.reduce_scatter(out, one, op=dist.ReduceOp.AVG, group=group)
        same(out, tensor(mean[[group.rank]], dtype).astype("float64").numpy())
    else:
        words = ["reduce_scatter", dtype]
        refused(TypeError, words, dist.reduce_scatter, out, one, op=dist.ReduceOp.AVG, group=group)


def halves(group):
    """Sums of half precision are formed in float32 and rounded once."""
    rounding = {"float16": lambda x: x.astype(np.float16), "bfloat16": bfloat16}
    for dtype, rounded in rounding.items():
        inputs = [rounded(np.random.default_rng(rank).standard_normal(50).astype(np.float32)) for rank in group.ranks]
        inputs = [one.astype(np.float32) for one in inputs]
        one = tensor(inputs[group.rank], dtype)
        dist.all_reduce(one, group=group)
        if group.nranks == 2:  # with more, the order in which Gloo adds decides the last bit
            same(one, rounded(sum(inputs)).astype(np.float64))
        else:
            np.testing.assert_allclose(one.astype("float32").numpy(), sum(inputs), rtol=2**-8, atol=2**-8)


def bfloat16(values):
    """The nearest numbers with 8 significant bits, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def moves(group):
    everyone, me, size = group.ranks, group.rank, group.nranks
    last = everyone[-1]
    for dtype in dtypes(group):
        for shape in ([5], [2, 3], [], [0]):
            inputs = [draw(rank, shape, dtype) for rank in everyone]
            pieces = [draw(100 + rank, shape, dtype) for rank in everyone]  # what the last one scatters
            for options in streams(dtype):
                one = tensor(inputs[me], dtype)
                dist.stream.broadcast(one, src=last, group=group, **options)
                same(one, inputs[-1])
                gathered = []
                dist.stream.all_gather(gathered, tensor(inputs[me], dtype), group=group, **options)
                for got, expected in zip(gathered, inputs, strict=True):
                    same(got, expected)
                one = tensor(np.zeros(shape), dtype)
                source = [tensor(piece, dtype) for piece in pieces] if last == RANK else None
                dist.stream.scatter(one, source, src=last, group=group, **options)
                same(one, pieces[me])
                if shape:
                    whole = tensor(np.zeros([size * shape[0], *shape[1:]]), dtype)
                    dist.stream.all_gather(whole, tensor(inputs[me], dtype), group=group, **options)
                    same(whole, np.concatenate(inputs))
                    one = tensor(np.zeros(shape), dtype)
                    source = tensor(np.concatenate(pieces), dtype) if last == RANK else None
                    dist.stream.scatter(one, source, src=last, group=group, **options)
                    same(one, pieces[me])
            gathered = [tensor(np.zeros(shape), dtype) for _ in everyone]
            dist.gather(tensor(inputs[me], dtype), gathered if last == RANK else None, dst=last, group=group)
            if last == RANK:
                for got, expected in zip(gathered, inputs, strict=True):
                    same(got, expected)


def reduce_scatters(group):
    me, size = group.rank, group.nranks
    cut = slice(3 * me, 3 * me + 3)
    for dtype in dtypes(group):
        inputs = [draw(rank, [size * 3, 2], dtype) for rank in group.ranks]
        for name, oracle in OPS.items():
            expected = oracle(inputs, axis=0)[cut]
            expected = (expected != 0).astype(float) if dtype == "bool" else expected
            for options in streams(dtype):
                mine, op = tensor(inputs[me], dtype), getattr(dist.ReduceOp, name)
                for source in (mine, [mine[3 * i : 3 * i + 3] for i in range(size)]):
                    out = tensor(np.zeros([3, 2]), dtype)
                    dist.stream.reduce_scatter(out, source, op=op, group=group, **options)
                    same(out, expected)
                same(mine, inputs[me])  # the input stays
    sizes = range(size)  # pieces of different sizes, one of them empty
    inputs = [np.split(draw(rank, sum(sizes)), np.cumsum(sizes)[:-1]) for rank in group.ranks]
    out = tensor(np.zeros(sizes[me]))
    dist.reduce_scatter(out, [tensor(piece) for piece in inputs[me]], group=group)
    same(out, sum(pieces[me] for pieces in inputs))


def all_to_alls(group):
    me, size = group.rank, group.nranks
    cut = slice(3 * me, 3 * me + 3)
    for dtype in dtypes(group):
        for options in streams(dtype):
            inputs = [draw(rank, [size * 3, 2], dtype) for rank in group.ranks]
            mine, expected = tensor(inputs[me], dtype), np.concatenate([one[cut] for one in inputs])
            for function in (dist.stream.alltoall, dist.stream.alltoall_single):
                out = tensor(np.zeros([size * 3, 2]), dtype)
                function(out, mine, group=group, **options)
                same(out, expected)
            out = []
            dist.stream.alltoall(out, [mine[3 * i : 3 * i + 3] for i in range(size)], group=group, **options)
            same(paddle.concat(out), expected)
            uneven_exchange(group, dtype, options)


def uneven_exchange(group, dtype, options):
    """Member i sends (i + 2·j) % 4 rows to member j."""
    me, size = group.rank, group.nranks
    rows = [[(i + 2 * j) % 4 for j in range(size)] for i in range(size)]
    inputs = [draw([rank, 7], [sum(rows[i]), 3], dtype) for i, rank in enumerate(group.ranks)]
    pieces = [np.split(inputs[i], np.cumsum(rows[i])[:-1]) for i in range(size)]
    expected = np.concatenate([pieces[i][me] for i in range(size)])
    received = [rows[i][me] for i in range(size)]
    out = tensor(np.zeros([sum(received), 3]), dtype)
    dist.stream.alltoall_single(out, tensor(inputs[me], dtype), received, rows[me], group=group, **options)
    same(out, expected)
    outs = [tensor(np.zeros([count, 3]), dtype) for count in received]
    dist.stream.alltoall(outs, [tensor(piece, dtype) for piece in pieces[me]], group=group, **options)
    for got, i in zip(outs, range(size), strict=True):
        same(got, pieces[i][me])


def input_first(group):
    """Methods of the group itself that Fleet calls, whose input comes before the output and which have no sync_op."""
    me, size, methods = group.rank, group.nranks, group.process_group
    inputs = [draw([rank, 8], [size, 2]) for rank in group.ranks]
    mine, whole = tensor(inputs[me]), tensor(np.zeros([size * size, 2]))
    methods.all_gather(mine, whole).wait()
    same(whole, np.concatenate(inputs))
    one = tensor(np.zeros([2]))
    methods.scatter(list(mine), one, size - 1).wait()
    same(one, inputs[-1][me])
    column = np.stack([rows[me] for rows in inputs])
    out = [tensor(np.zeros([2])) for _ in range(size)]
    methods.alltoall(list(mine), out).wait()
    same(paddle.stack(out), column)
    together = tensor(np.zeros([size, 2]))
    methods.alltoall_single(mine, together, [1] * size, [1] * size).wait()
    same(together, column)
    methods.allreduce(mine).wait()
    same(mine, sum(inputs))


def objects(group):
    """Paddle's collectives of Python objects, which stand on those of tensors."""
    gathered = []
    dist.all_gather_object(gathered, {"rank": RANK, "text": "x" * RANK}, group=group)
    assert gathered == [{"rank": rank, "text": "x" * rank} for rank in group.ranks]
    shared = [{"from": RANK}]
    dist.broadcast_object_list(shared, src=group.ranks[-1], group=group)
    assert shared == [{"from": group.ranks[-1]}]


def layouts_in_memory(group):
    """Tensors that are not contiguous, and views, of which only the part is written."""
    everyone, me = group.ranks, group.rank
    inputs = [draw(rank, [3, 4]) for rank in everyone]
    total = np.sum(inputs, axis=0)
    base = tensor(inputs[me])
    turned = base.t()
    assert not turned.is_contiguous()
    dist.all_reduce(turned, group=group)
    same(turned, total.T)
    base = tensor(inputs[me])
    dist.all_reduce(base[1:2], group=group)
    same(base, np.concatenate([inputs[me][:1], total[1:2], inputs[me][2:]]))
    turned = tensor(inputs[me]).t()
    dist.broadcast(turned, src=everyone[-1], group=group)
    same(turned, inputs[-1].T)
    gathered = paddle.zeros([4 * len(everyone), 3])
    dist.stream.all_gather(gathered, tensor(inputs[me]).t(), group=group)
    same(gathered, np.concatenate([one.T for one in inputs]))
    parameter = paddle.create_parameter([3, 4], "float32")
    with paddle.no_grad():
        parameter.copy_(tensor(inputs[me]), True)
    dist.broadcast(parameter, src=everyone[0], group=group)
    same(parameter, inputs[0])
    following, before = everyone[(me + 1) % len(everyone)], everyone[me - 1]
    dist.send(tensor(inputs[me]).t(), dst=following, group=group)
    got = paddle.zeros([3, 4]).t()
    dist.recv(got, src=before, group=group)
    same(got, inputs[me - 1].T)


def refusals(group):
    one = paddle.ones([group.nranks]).astype("complex64")
    others = [one.clone() for _ in group.ranks]
    first, peer = group.ranks[0], group.ranks[group.rank - 1]
    for name, function, arguments in (
        ("all_reduce", dist.all_reduce, [one]),
        ("reduce", dist.reduce, [one, first]),
        ("broadcast", dist.broadcast, [one, first]),
        ("all_gather", dist.all_gather, [others, one]),
        ("scatter", dist.scatter, [one, others, first]),
        ("gather", dist.gather, [one, others, first]),
        ("reduce_scatter", dist.reduce_scatter, [one[:1], one]),
        ("send", dist.send, [one, peer]),
        ("recv", dist.recv, [one, peer]),
    ):
        refused(TypeError, [name, "complex64", "bfloat16"], function, *arguments, group=group)
    refused(TypeError, ["send", "complex64"], dist.alltoall, list(others), others, group=group)
    two, odd = paddle.zeros([2]), paddle.zeros([group.nranks + 1])
    refused(ValueError, ["all_to_all"], dist.alltoall_single, odd.clone(), odd, group=group)
    refused(ValueError, ["reduce_scatter"], dist.reduce_scatter, two, odd, group=group)
    refused(ValueError, ["all_gather"], dist.stream.all_gather, odd, two[:1], group=group)


def main():
    context = ParallelContext.create(Topology(RANK, WORLD, mp_degree=WORLD))
    world = context.group("mp")
    parts = [[0, 2], [2, 3], [3, 1, 2]] if WORLD == 4 else []
    for group in [world, *(dist.new_group(ranks) for ranks in parts)]:
        if RANK not in group.ranks:
            continue
        for scene in (
            reductions,
            moves,
            reduce_scatters,
            all_to_alls,
            input_first,
            objects,
            layouts_in_memory,
            refusals,
            messages,
            tensor_parallel,
            cross_entropy,
        ):
            started = time.monotonic()
            scene(group)
            print(f"{scene.__name__} on {group.ranks}: {time.monotonic() - started:.2f} s", flush=True)
    sequence_parallel(world)
    broadcast_input(world)
    print("all collectives done", flush=True)
    if WORLD == 2:
        a_lost_message()
        print("heard of the lost message", flush=True)
    else:
        context.close()


if __name__ == "__main__":
    main()
