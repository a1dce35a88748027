"""Llama 3: rotary positions, RMSNorm, SwiGLU, no biases (Grattafiori et al. 2024)."""

from __future__ import annotations

from paddle import nn

from ppfleetx.config import Config
from ppfleetx.distributed import RNGStatesTracker
from ppfleetx.layers.edges import Edges
from ppfleetx.layers.mlp import SwiGLU
from ppfleetx.layers.norm import RMSNorm
from ppfleetx.layers.rotary import Rotary
from ppfleetx.models import pieces


class PieceMaker(pieces.PieceMaker):
    """Llama's parts."""

    def __init__(self, config: Config, tracker: RNGStatesTracker, edges: Edges):
        super().__init__(config, tracker, edges)
        model = config.Model
        self.rotary = Rotary(model.hidden_size // model.num_attention_heads, model.rope_theta, model.rope_scaling)

    def norm(self, path: str) -> nn.Layer:
        """RMSNorm."""
        return RMSNorm(path, self.maker, self.config.Model.rms_norm_eps)

    def mlp(self, path: str) -> nn.Layer:
        """Three matrices, gated."""
        return SwiGLU(path, self.maker, self.config.Model.fused_linear)
