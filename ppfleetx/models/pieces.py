"""A model is a list of pieces, each mapping one tensor to one tensor."""

from __future__ import annotations

from collections.abc import Sequence

import paddle
from paddle import nn


class PieceList(nn.Layer):
    """The pieces of one pipeline stage, in model order.

    Args:
        chunks: runs of pieces that follow one another; more than one only where the pipeline is interleaved.
    """

    def __init__(self, chunks: Sequence[Sequence[nn.Layer]]):
        super().__init__()
        self.chunks = nn.LayerList([nn.LayerList(list(chunk)) for chunk in chunks])

    def forward(self, x: paddle.Tensor, chunk: int = 0) -> paddle.Tensor:
        """Input of a chunk's first piece → output of its last."""
        for piece in self.chunks[chunk]:
            x = piece(x)
        return x
