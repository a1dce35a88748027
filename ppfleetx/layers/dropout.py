"""Dropout that draws from a named random stream."""

from __future__ import annotations

import paddle
import paddle.nn.functional as F
from paddle import nn

from ppfleetx.distributed import RNGStatesTracker

#: for values that every tensor rank holds alike: the same mask on all of them
REPLICATED = "global_seed"
#: for values that tensor parallelism cuts: another mask on each rank
CUT = "local_seed"


class Dropout(nn.Layer):
    """Zeroes a share `p` of the elements in training and scales the rest by 1/(1−p).

    Args:
        p: share in [0, 1).
        stream: the tracker's stream to draw from, `REPLICATED` or `CUT`.
        tracker: the run's streams.
    """

    def __init__(self, p: float, stream: str, tracker: RNGStatesTracker):
        super().__init__()
        self.p, self.stream, self.tracker = p, stream, tracker

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """Any shape → the same shape."""
        if not self.training or self.p == 0:
            return x
        with self.tracker.rng_state(self.stream):
            return F.dropout(x, self.p, training=True)
