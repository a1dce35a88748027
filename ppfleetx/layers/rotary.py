"""Rotary position embedding (Su et al. 2021), with Llama 3.1's scaling of its frequencies.

Dim i of a head is turned together with dim i + d/2 (the layout of Hugging Face's files, and of ours), not with its neighbour
as in Meta's own files. Shapes: s sequence, b batch, n heads, d head dim.
"""

from __future__ import annotations

import math

import numpy as np
import paddle

from ppfleetx.config.schema import RopeScalingConfig
from ppfleetx.layers.precision import full_precision


class Rotary:
    """Turns queries and keys by their positions; one object serves all blocks. It has no parameters.

    Args:
        head_dim: d, even.
        theta: base of the frequencies.
        scaling: Llama 3.1's; None: none.
    """

    def __init__(self, head_dim: int, theta: float, scaling: RopeScalingConfig | None = None):
        self.frequencies = frequencies(head_dim, theta, scaling)
        self._tables: tuple[paddle.Tensor, paddle.Tensor] | None = None

    def __call__(self, x: paddle.Tensor) -> paddle.Tensor:
        """[s, b, n, d] → the same, place i of dim 0 being position i: all of a sequence must be there. Computes in float32."""
        cos, sin = self._of_length(x)
        with full_precision(x):
            first, second = x.astype("float32").chunk(2, axis=-1)
            turned = paddle.concat([first * cos - second * sin, second * cos + first * sin], axis=-1)
            return turned.astype(x.dtype)

    def _of_length(self, x: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        """cos and sin, float32 [s, 1, 1, d/2]; made once for a length."""
        length = x.shape[0]
        if self._tables is None or self._tables[0].shape[0] != length or self._tables[0].place != x.place:
            angles = np.outer(np.arange(length), self.frequencies)[:, None, None]
            tables = [
                paddle.to_tensor(part.astype("float32"), place=x.place) for part in (np.cos(angles), np.sin(angles))
            ]
            self._tables = tables[0], tables[1]
        return self._tables


def frequencies(head_dim: int, theta: float, scaling: RopeScalingConfig | None = None) -> np.ndarray:
    """Radians a position of each pair of dims, float64 [head_dim / 2]: θ^(−2i/d).

    Scaled (Llama 3.1, `apply_scaling` of its reference code): a pair that turns less than low_freq_factor times in the original
    context is slowed down by `factor`, one that turns more than high_freq_factor times stays as it is, and both mix in between.
    """
    plain = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    if scaling is None:
        return plain
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)  # in the original context
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return kept * plain + (1 - kept) * plain / scaling.factor
