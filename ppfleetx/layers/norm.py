"""Normalisation layers; their parameters are whole on every tensor rank."""

from __future__ import annotations

import paddle
import paddle.nn.functional as F
from paddle import nn

from ppfleetx.layers.parameter import ParameterMaker
from ppfleetx.layers.precision import full_precision


class LayerNorm(nn.Layer):
    """Layer normalisation over the last dim (Ba et al. 2016): [..., h] → [..., h]."""

    def __init__(self, path: str, maker: ParameterMaker, epsilon: float = 1e-5):
        super().__init__()
        self.weight = maker.create(self, f"{path}.weight")
        self.bias = maker.create(self, f"{path}.bias")
        self.epsilon = epsilon

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """[..., h] → [..., h]."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)


class RMSNorm(nn.Layer):
    """x / √(mean(x²) + ε) · w over the last dim (Zhang & Sennrich 2019): [..., h] → [..., h]; the mean in float32.

    Written out, since Paddle 3.3.1 has `rms_norm` on GPUs only.
    """

    def __init__(self, path: str, maker: ParameterMaker, epsilon: float):
        super().__init__()
        self.weight = maker.create(self, f"{path}.weight")
        self.epsilon = epsilon

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """[..., h] → [..., h]."""
        with full_precision(x):
            wide = x.astype("float32")
            scaled = wide * paddle.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
            return scaled.astype(x.dtype) * self.weight.astype(x.dtype)
