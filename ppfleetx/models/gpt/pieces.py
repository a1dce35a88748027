"""GPT: learned positions, LayerNorm, GELU, tied head (Radford et al. 2019)."""

from __future__ import annotations

from paddle import nn

from ppfleetx.layers.embedding import PositionEmbedding
from ppfleetx.layers.mlp import MLP
from ppfleetx.layers.norm import LayerNorm
from ppfleetx.models import pieces
from ppfleetx.models.gpt.spec import POSITION_EMBEDDING


class PieceMaker(pieces.PieceMaker):
    """GPT's parts."""

    def norm(self, path: str) -> nn.Layer:
        """LayerNorm."""
        return LayerNorm(path, self.maker)

    def mlp(self, path: str) -> nn.Layer:
        """Two matrices with GELU between."""
        return MLP(path, self.maker, self.config.Model.fused_linear)

    def positions(self) -> nn.Layer:
        """One learned row a position."""
        return PositionEmbedding(POSITION_EMBEDDING, self.maker)
