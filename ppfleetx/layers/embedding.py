"""Token embedding and head; tensor parallelism cuts both over the vocabulary."""

from __future__ import annotations

import paddle
import paddle.nn.functional as F
from paddle import nn

from ppfleetx.layers.edges import Edges
from ppfleetx.layers.parameter import ParameterMaker


class ParallelEmbedding(nn.Layer):
    """Rows of a matrix, cut over its rows: ids int64 [s, b] → [s, b, h] (with sequence parallel [s/mp, b, h])."""

    def __init__(self, name: str, maker: ParameterMaker):
        super().__init__()
        self.weight = maker.create(self, name)
        self.edges = maker.edges

    def forward(self, ids: paddle.Tensor) -> paddle.Tensor:
        """ids int64 [s, b] in 0..vocabulary-1 → [s, b, h] or [s/mp, b, h]."""
        if self.edges.tensor is None:
            return F.embedding(ids, self.weight)
        ids = ids - self.edges.mp_rank * self.weight.shape[0]
        mine = (ids >= 0) & (ids < self.weight.shape[0])
        rows = F.embedding(paddle.where(mine, ids, paddle.zeros_like(ids)), self.weight)
        return self.edges.leave(rows * mine.astype(rows.dtype).unsqueeze(-1))


class PositionEmbedding(nn.Layer):
    """One learned row a position, whole on every rank; adds those of the local part of the sequence."""

    def __init__(self, name: str, maker: ParameterMaker):
        super().__init__()
        self.weight = maker.create(self, name)
        self.edges = maker.edges

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """[s, b, h] → [s, b, h], s the local length."""
        start = self.edges.sequence_start(x.shape[0])
        return x + self.weight[start : start + x.shape[0]].unsqueeze(1)


class ParallelHead(nn.Layer):
    """Logits x·Wᵀ: [s, b, h] (with sequence parallel [s/mp, b, h]) → [s, b, V/mp].

    Args:
        weight: W; of a tied head the Parameter of the embedding itself, held, not copied, so that it stays one parameter.
        edges: this rank's edges.
    """

    def __init__(self, weight: paddle.Tensor, edges: Edges):
        super().__init__()
        self.weight, self.edges = weight, edges

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """[s, b, h] → [s, b, V/mp], V the padded vocabulary."""
        return paddle.matmul(self.edges.enter(x), self.weight, transpose_y=True)
