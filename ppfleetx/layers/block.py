"""A transformer block, whatever its parts."""

from __future__ import annotations

import paddle
from paddle import nn

from ppfleetx.layers.dropout import Dropout
from ppfleetx.layers.recompute import RecomputePlan


class Block(nn.Layer):
    """x + attention(norm(x)), then x + mlp(norm(x)), with dropout on what is added.

    Args:
        norms: before the attention and before the MLP.
        attention, mlp, dropout: [s, b, h] → [s, b, h].
        plan: what is recomputed.
        number: of the block, from 0.
    """

    def __init__(
        self,
        norms: tuple[nn.Layer, nn.Layer],
        attention: nn.Layer,
        mlp: nn.Layer,
        dropout: Dropout,
        plan: RecomputePlan,
        number: int,
    ):
        super().__init__()
        self.norm1, self.norm2 = norms
        self.attention, self.mlp, self.dropout = attention, mlp, dropout
        self._call_block = plan.caller("full", number)
        self._call_attention = plan.caller("full_attn", number)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """[s, b, h] → [s, b, h]."""
        return self._call_block(self._compute, x)

    def _compute(self, x: paddle.Tensor) -> paddle.Tensor:
        x = x + self.dropout(self._call_attention(self.attention, self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))
