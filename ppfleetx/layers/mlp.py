"""The feed-forward part of a block."""

from __future__ import annotations

import paddle
import paddle.nn.functional as F
from paddle import nn

from ppfleetx.layers.linear import ColumnParallelLinear, RowParallelLinear
from ppfleetx.layers.parameter import ParameterMaker


class MLP(nn.Layer):
    """W₂·gelu(W₁·x + b₁) + b₂ with the tanh form of GELU (Hendrycks & Gimpel 2016): [s, b, h] → [s, b, h]."""

    def __init__(self, path: str, maker: ParameterMaker, fused_linear: bool = False):
        super().__init__()
        self.up = ColumnParallelLinear(f"{path}.up", maker, fused_linear)
        self.down = RowParallelLinear(f"{path}.down", maker, fused_linear)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """[s, b, h] → [s, b, h]."""
        return self.down(F.gelu(self.up(x), approximate=True))


class SwiGLU(nn.Layer):
    """W₂·(silu(W₁·x) ∘ W₃·x) (Shazeer 2020): [s, b, h] → [s, b, h]. W₁ and W₃ (gate and up) are one matmul."""

    def __init__(self, path: str, maker: ParameterMaker, fused_linear: bool = False):
        super().__init__()
        self.gate_up = ColumnParallelLinear(f"{path}.gate_up", maker, fused_linear)
        self.down = RowParallelLinear(f"{path}.down", maker, fused_linear)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """[s, b, h] → [s, b, h]."""
        return self.down(F.swiglu(self.gate_up(x)))  # a rank's columns: those of its gate, then those of its up matrix
