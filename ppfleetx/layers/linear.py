"""Linear layers whose weight tensor parallelism cuts by columns or by rows (Shoeybi et al. 2019, section 3).

With one member in the tensor group both are y = x·W + b; there is no b where the model's specs have none. Shapes: s sequence,
b batch, [s, b, in] → [s, b, out].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.autograd import PyLayer

from ppfleetx.layers.edges import Edges
from ppfleetx.layers.kernels import has_kernel
from ppfleetx.layers.parameter import ParameterMaker


class _Linear(nn.Layer):
    def __init__(self, path: str, maker: ParameterMaker, fused: bool = False):
        super().__init__()
        self.weight = maker.create(self, f"{path}.weight")
        self.bias = maker.create(self, f"{path}.bias") if f"{path}.bias" in maker.specs else None
        self.edges = maker.edges
        self._linear = _fused_linear if fused else _linear


class ColumnParallelLinear(_Linear):
    """y = x·W + b with W and b cut over columns: x whole (with sequence parallel cut along s), y cut on its last dim."""

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """[s, b, in] (with sequence parallel [s/mp, b, in]) → [s, b, out/mp]."""
        if self.edges.tensor is None:
            return self._linear(x, self.weight, self.bias)
        return _EnterAndMultiply.apply(x, self.weight, self.bias, self._linear, self.edges)


class _EnterAndMultiply(PyLayer):
    """x·W + b of a column-parallel layer, whose backward pass communicates beside the computation (Korthikanti et al. 2022,
    section 4.2.2; Fleet's `mp_async_allreduce` and `recompute_allgather`).

    With sequence parallel only this rank's part of x is kept: the backward pass gathers it while it computes dY·Wᵀ. The sum
    of that over the ranks travels while dW and db are computed. The numbers are those of `Edges.enter` and a linear layer.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: paddle.Tensor,
        weight: paddle.Tensor,
        bias: paddle.Tensor | None,
        linear: Callable[..., Any],
        edges: Edges,
    ) -> paddle.Tensor:
        y = linear(edges.start_whole(x, overlap=False).wait(), weight, bias)
        ctx.edges, ctx.x_dtype, ctx.bias_dtype = edges, x.dtype, None if bias is None else bias.dtype
        ctx.wanted = [tensor is not None and not tensor.stop_gradient for tensor in (x, weight, bias)]
        # The weight is the parameter itself: sharding may empty it now, and fills it again before the backward pass.
        ctx.save_for_backward(x.astype(y.dtype), weight)  # autocast makes y half
        return y

    @staticmethod
    def backward(ctx: Any, dy: paddle.Tensor) -> tuple[paddle.Tensor | None, ...]:
        x, weight = ctx.saved_tensor()
        wants_x, wants_weight, wants_bias = ctx.wanted
        whole = ctx.edges.start_whole(x) if wants_weight else None
        total = dw = db = None
        if wants_x:
            dx = paddle.matmul(dy, weight.astype(dy.dtype), transpose_y=True)
            total = ctx.edges.start_backward(dx.astype(ctx.x_dtype))
        rows = dy.flatten(0, 1)
        if whole is not None:
            dw = paddle.matmul(whole.wait().flatten(0, 1), rows, transpose_x=True).astype(weight.dtype)
        if wants_bias:
            db = _sum_of_rows(rows).astype(ctx.bias_dtype)
        gradients = (None if total is None else total.wait(), dw, db)
        return gradients if ctx.bias_dtype is not None else gradients[:2]  # one for each tensor that went in


class RowParallelLinear(_Linear):
    """y = x·W + b with W cut over rows and b whole: x cut on its last dim, y whole (with sequence parallel cut along s)."""

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """[s, b, in/mp] → [s, b, out] (with sequence parallel [s/mp, b, out])."""
        if self.edges.tensor is None:
            return self._linear(x, self.weight, self.bias)
        y = self.edges.leave(paddle.matmul(x, self.weight))
        return _add_bias(y, self.bias)  # once, after the sum


def _linear(x: paddle.Tensor, weight: paddle.Tensor, bias: paddle.Tensor | None) -> paddle.Tensor:
    """x·W + b."""
    if not x.place.is_cpu_place():
        return F.linear(x, weight, bias)
    return _add_bias(paddle.matmul(x, weight), bias)


def _fused_linear(x: paddle.Tensor, weight: paddle.Tensor, bias: paddle.Tensor | None) -> paddle.Tensor:
    """Matmul and bias in one cuBLASLt kernel, where the device has it."""
    if bias is None or not has_kernel("fused_gemm_epilogue", x):
        return _linear(x, weight, bias)
    return paddle.incubate.nn.functional.fused_linear(x, weight, bias)


def _add_bias(y: paddle.Tensor, bias: paddle.Tensor | None) -> paddle.Tensor:
    """y + b, b over the last dim."""
    if bias is None:
        return y
    return _AddBias.apply(y, bias) if y.place.is_cpu_place() else y + bias


class _AddBias(PyLayer):
    """On a CPU Paddle's own gradient of a bias takes a fifth of the quickstart's step (3.3.1)."""

    @staticmethod
    def forward(ctx: Any, y: paddle.Tensor, bias: paddle.Tensor) -> paddle.Tensor:
        ctx.wants_bias = not bias.stop_gradient
        return y + bias

    @staticmethod
    def backward(ctx: Any, dy: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor | None]:
        return dy, _sum_of_rows(dy.flatten(0, -2)) if ctx.wants_bias else None


def _sum_of_rows(rows: paddle.Tensor) -> paddle.Tensor:
    """[n, out] → [out]; on a CPU as a product with ones, which is 50 times as fast."""
    if not rows.place.is_cpu_place():
        return rows.sum(0)
    return paddle.matmul(paddle.ones([1, rows.shape[0]], rows.dtype), rows).squeeze(0)
