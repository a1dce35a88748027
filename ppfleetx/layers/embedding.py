"""Token embedding and the head tied to it; tensor parallelism cuts both over the vocabulary."""

from __future__ import annotations

import paddle
import paddle.nn.functional as F
from paddle import nn

from ppfleetx.layers.parameter import ParameterMaker


class ParallelEmbedding(nn.Layer):
    """Rows of a matrix cut over its rows: ids int64 [...] → [..., h]."""

    def __init__(self, name: str, maker: ParameterMaker):
        super().__init__()
        self.weight = maker.create(self, name)

    def forward(self, ids: paddle.Tensor) -> paddle.Tensor:
        """ids int64 [...] in 0..vocabulary-1 → [..., h]."""
        return F.embedding(ids, self.weight)


class ParallelHead(nn.Layer):
    """Logits x·Wᵀ with W the tied embedding: [s, b, h] → [s, b, V], V the padded vocabulary.

    Args:
        weight: the Parameter of the embedding itself; held, not copied, so that it stays one parameter.
    """

    def __init__(self, weight: paddle.Tensor):
        super().__init__()
        self.weight = weight

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """[s, b, h] → [s, b, V]."""
        return paddle.matmul(x, self.weight, transpose_y=True)
