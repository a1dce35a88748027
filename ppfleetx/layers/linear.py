"""Linear layers whose weight tensor parallelism cuts by columns or by rows (Shoeybi et al. 2019, section 3).

With one member in the tensor group both are y = x·W + b. Shapes: s sequence, b batch, [s, b, in] → [s, b, out].
"""

from __future__ import annotations

import paddle
import paddle.nn.functional as F
from paddle import nn

from ppfleetx.layers.parameter import ParameterMaker


class _Linear(nn.Layer):
    def __init__(self, path: str, maker: ParameterMaker, fused: bool = False):
        super().__init__()
        self.weight = maker.create(self, f"{path}.weight")
        self.bias = maker.create(self, f"{path}.bias")
        self.edges = maker.edges
        self._linear = _fused_linear() if fused else F.linear


class ColumnParallelLinear(_Linear):
    """y = x·W + b with W and b cut over columns: x whole (with sequence parallel cut along s), y cut on its last dim."""

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """[s, b, in] (with sequence parallel [s/mp, b, in]) → [s, b, out/mp]."""
        return self._linear(self.edges.enter(x), self.weight, self.bias)


class RowParallelLinear(_Linear):
    """y = x·W + b with W cut over rows and b whole: x cut on its last dim, y whole (with sequence parallel cut along s)."""

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """[s, b, in/mp] → [s, b, out] (with sequence parallel [s/mp, b, out])."""
        if self.edges.tensor is None:
            return self._linear(x, self.weight, self.bias)
        # the bias is added once, after the sum
        return self.edges.leave(paddle.matmul(x, self.weight)) + self.bias


def _fused_linear():  # type: ignore[no-untyped-def]
    """Matmul and bias in one cuBLASLt kernel; it exists in GPU builds only."""
    if not paddle.is_compiled_with_cuda():
        return F.linear
    from paddle.incubate.nn.functional import fused_linear

    return fused_linear
