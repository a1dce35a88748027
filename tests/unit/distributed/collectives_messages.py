"""Scenes of collectives_worker.py: messages between two ranks, in rings and in batches, and one that is lost."""

from __future__ import annotations

import os
import time

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.distributed.fleet.meta_parallel.pp_utils import p2p_communication

from ppfleetx.distributed import gloo
from tests.unit.distributed.collectives_values import DTYPES, draw, refused, same, tensor

RANK = int(os.environ["PADDLE_TRAINER_ID"])


def messages(group):
    """A ring in which everyone sends before it receives, 50 messages each way, of changing sizes and dtypes."""
    me, size = group.rank, group.nranks
    forth, back = group.ranks[(me + 1) % size], group.ranks[me - 1]

    def message(sender, way, number):
        return draw([sender, way, number], [1 + number * 7 % 40], DTYPES[number % len(DTYPES)])

    for number in range(50):
        for way, peer in enumerate((forth, back)):
            one = tensor(message(RANK, way, number), DTYPES[number % len(DTYPES)])
            dist.send(one, dst=peer, group=group)
            one.zero_()  # the message is what it was when it was sent
    for number in range(50):
        for way, peer in enumerate((back, forth)):
            expected = message(peer, way, number)
            one = tensor(np.zeros(expected.shape), DTYPES[number % len(DTYPES)])
            dist.recv(one, src=peer, group=group)
            same(one, expected)
    batches(group, forth, back)
    every_dtype_both_ways(group, forth, back)


def batches(group, forth, back):
    """Batches that name their receives first."""
    mine, got = tensor(draw(RANK, [4, 6])), paddle.zeros([4, 6])
    receive, send = dist.P2POp(dist.irecv, got, back, group), dist.P2POp(dist.isend, mine, forth, group)
    for task in dist.batch_isend_irecv([receive, send]):
        task.wait()
    same(got, draw(back, [4, 6]))
    module = p2p_communication
    got, got_back = paddle.zeros([4, 6]), paddle.zeros([4, 6])
    module.batch_send_recv_on_calc_stream(
        [
            module.P2PonCalcStream(module._recv_on_calc_stream, got, back, group),
            module.P2PonCalcStream(module._recv_on_calc_stream, got_back, forth, group),
            module.P2PonCalcStream(module._send_on_calc_stream, mine + 1, forth, group),
            module.P2PonCalcStream(module._send_on_calc_stream, mine + 2, back, group),
        ]
    )
    same(got, draw(back, [4, 6]) + 1)
    same(got_back, draw(forth, [4, 6]) + 2)
    got = paddle.zeros([4, 6])  # the part number 2 of 3, as mp ranks of a pipeline do
    module.batch_send_recv_on_calc_stream(
        [
            module.P2PonCalcStream(module._recv_on_calc_stream, got, back, group, 3, 2),
            module.P2PonCalcStream(module._send_on_calc_stream, mine, forth, group, 3, 2),
        ]
    )
    expected = np.zeros(24)
    expected[16:] = draw(back, [4, 6]).flatten()[16:]
    same(got, expected.reshape([4, 6]))
    size = group.nranks
    whole = paddle.zeros([4 * size])
    whole[4 * group.rank : 4 * group.rank + 4] = RANK + 1.0
    module.allgather_partial(whole, size, group.rank, group)
    same(whole, np.repeat(np.array(group.ranks) + 1.0, 4))
    task = dist.irecv(got, src=back, group=group)
    if group.rank == 0:
        assert not task.is_completed()  # its sender sends only once it has received
        dist.send(mine, dst=forth, group=group)
    task.wait()
    assert task.is_completed()
    if group.rank != 0:
        dist.send(mine, dst=forth, group=group)
    same(got, draw(back, [4, 6]))


def every_dtype_both_ways(group, forth, back):
    for dtype in DTYPES:
        task = dist.irecv(got := tensor(np.zeros([3]), dtype), src=forth, group=group)
        dist.isend(tensor(draw(RANK, [3], dtype), dtype), dst=back, group=group).wait()
        task.wait()
        same(got, draw(forth, [3], dtype))


def a_lost_message():
    """The receiver leaves: the sender hears of it at once, at its next send, and ends with an error."""
    group = dist.get_group(0)
    if RANK == 1:
        one = paddle.zeros([3])
        dist.recv(one, src=0)
        same(one, np.ones(3))
        return
    dist.send(paddle.ones([3]), dst=1)
    gloo.flush()
    dist.send(paddle.ones([3]), dst=1)  # nobody receives it
    started = time.monotonic()
    refused(RuntimeError, ["from rank 0 to rank 1 was lost"], gloo.flush)
    assert time.monotonic() - started < 20
    refused(RuntimeError, ["from rank 0 to rank 1 was lost"], dist.send, paddle.ones([3]), dst=1)
    refused(RuntimeError, ["from rank 0 to rank 1 was lost"], dist.recv, paddle.ones([3]), src=1)
    assert group.nranks == 2
