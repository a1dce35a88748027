"""GPT: learned positions, pre-norm blocks, tied head (Radford et al. 2019).

Shapes: b batch, s sequence, h hidden, V padded vocabulary. Inside the model [s, b, h].
"""

from __future__ import annotations

import paddle
from paddle import nn

from ppfleetx.config import Config
from ppfleetx.distributed import RNGStatesTracker
from ppfleetx.distributed.pipeline import stage_blocks
from ppfleetx.layers.attention import AttentionOptions, CausalSelfAttention
from ppfleetx.layers.dropout import Dropout
from ppfleetx.layers.edges import Edges
from ppfleetx.layers.embedding import ParallelEmbedding, ParallelHead, PositionEmbedding
from ppfleetx.layers.mlp import MLP
from ppfleetx.layers.norm import LayerNorm
from ppfleetx.layers.parameter import ParameterMaker
from ppfleetx.layers.recompute import RecomputePlan
from ppfleetx.models.gpt import spec
from ppfleetx.models.pieces import PieceList


class Embedding(nn.Layer):
    """Word plus position embedding."""

    def __init__(self, maker: ParameterMaker, dropout: float):
        super().__init__()
        self.word = ParallelEmbedding(spec.WORD_EMBEDDING, maker)
        self.position = PositionEmbedding(spec.POSITION_EMBEDDING, maker)
        self.dropout = Dropout(dropout, maker.residual_stream, maker.tracker)

    def forward(self, ids: paddle.Tensor) -> paddle.Tensor:
        """ids int64 [b, s] → [s, b, h]."""
        return self.dropout(self.position(self.word(ids.transpose([1, 0]))))


class Block(nn.Layer):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, number: int, config: Config, maker: ParameterMaker, plan: RecomputePlan):
        super().__init__()
        path, model = f"blocks.{number}", config.Model
        self.norm1 = LayerNorm(f"{path}.norm1", maker)
        self.attention = CausalSelfAttention(
            f"{path}.attention", _attention_options(config, number), maker, plan, number
        )
        self.norm2 = LayerNorm(f"{path}.norm2", maker)
        self.mlp = MLP(f"{path}.mlp", maker, model.fused_linear)
        self.dropout = Dropout(model.hidden_dropout_prob, maker.residual_stream, maker.tracker)
        self._call_block = plan.caller("full", number)
        self._call_attention = plan.caller("full_attn", number)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """[s, b, h] → [s, b, h]."""
        return self._call_block(self._compute, x)

    def _compute(self, x: paddle.Tensor) -> paddle.Tensor:
        x = x + self.dropout(self._call_attention(self.attention, self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


def _attention_options(config: Config, number: int) -> AttentionOptions:
    model = config.Model
    return AttentionOptions(
        heads=model.num_attention_heads,
        head_dim=model.hidden_size // model.num_attention_heads,
        dropout=model.attention_probs_dropout_prob,
        qk_divisor=number + 1 if model.scale_qk_by_layer_num else 1,
        fused_qkv=model.fuse_attn_qkv,
        fused_linear=model.fused_linear,
        fused_softmax=model.fused_softmax_with_triangular,
        flash=model.use_flash_attn,
    )


def build_model(
    config: Config, tracker: RNGStatesTracker, edges: Edges | None = None, stage: tuple[int, int] = (0, 1)
) -> PieceList:
    """See `ppfleetx.models.registry.build_model`."""
    edges = edges or Edges()
    maker = ParameterMaker(spec.parameters(config), tracker, edges)
    plan = RecomputePlan(config.derived.recompute_granularity, config.derived.no_recompute_layers)
    number, count = stage
    num_chunks = config.Model.virtual_pp_degree if count > 1 else 1
    chunks: list[list[nn.Layer]] = [
        [Block(block, config, maker, plan) for block in blocks]
        for blocks in stage_blocks(config.Model.num_layers, count, num_chunks, number)
    ]
    if number == 0:
        chunks[0].insert(0, Embedding(maker, config.Model.hidden_dropout_prob))
    if number == count - 1:
        chunks[-1] += [LayerNorm("norm", maker), _head(chunks[0][0], maker)]
    return PieceList(chunks)


def _head(first: nn.Layer, maker: ParameterMaker) -> ParallelHead:
    """The head, tied: it holds the embedding's own Parameter, or, on a stage without it, one of the same logical name."""
    if isinstance(first, Embedding):
        return ParallelHead(first.word.weight, maker.edges)
    return ParallelHead(maker.create(nn.Layer(), spec.WORD_EMBEDDING), maker.edges)
