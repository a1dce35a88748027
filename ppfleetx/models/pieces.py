"""A model is a list of pieces, each mapping one tensor to one tensor."""

from __future__ import annotations

from collections.abc import Sequence

import paddle
from paddle import nn


class PieceList(nn.Layer):
    """The pieces one after another, on one pipeline stage."""

    def __init__(self, pieces: Sequence[nn.Layer]):
        super().__init__()
        self.pieces = nn.LayerList(list(pieces))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """Input of the first piece → output of the last."""
        for piece in self.pieces:
            x = piece(x)
        return x
