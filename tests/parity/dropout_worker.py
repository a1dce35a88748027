"""On 2 processes of one tensor group: the masks of dropout in each of its streams, printed as bits."""

from __future__ import annotations

import os

import paddle

from ppfleetx.distributed import ParallelContext, Topology, get_rng_state_tracker, seed_streams
from ppfleetx.layers.dropout import CUT, REPLICATED, Dropout

topology = Topology(int(os.environ["PADDLE_TRAINER_ID"]), 2, mp_degree=2)
with ParallelContext.create(topology, "cpu"):
    seed_streams(topology, 1024)
    for stream in (REPLICATED, CUT):
        mask = Dropout(0.5, stream, get_rng_state_tracker())(paddle.ones([64])) > 0
        print("MASK", stream, "".join(str(int(bit)) for bit in mask.tolist()), flush=True)
