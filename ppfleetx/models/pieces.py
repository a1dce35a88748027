"""A model is a list of pieces, each mapping one tensor to one tensor: embedding, blocks, norm, head.

Shapes: b batch, s sequence, h hidden, V padded vocabulary. Inside the model [s, b, h].
"""

from __future__ import annotations

from collections.abc import Sequence

import paddle
from paddle import nn

from ppfleetx.config import Config
from ppfleetx.distributed import RNGStatesTracker
from ppfleetx.distributed.pipeline import stage_blocks
from ppfleetx.layers.attention import AttentionOptions, CausalSelfAttention
from ppfleetx.layers.block import Block
from ppfleetx.layers.dropout import Dropout
from ppfleetx.layers.edges import Edges
from ppfleetx.layers.embedding import ParallelEmbedding, ParallelHead
from ppfleetx.layers.parameter import ParameterMaker
from ppfleetx.layers.recompute import RecomputePlan
from ppfleetx.layers.rotary import Rotary
from ppfleetx.models import registry
from ppfleetx.models.spec import FINAL_NORM, HEAD, WORD_EMBEDDING


class PieceList(nn.Layer):
    """The pieces of one pipeline stage, in model order.

    Args:
        chunks: runs of pieces that follow one another; more than one only where the pipeline is interleaved.
    """

    def __init__(self, chunks: Sequence[Sequence[nn.Layer]]):
        super().__init__()
        self.chunks = nn.LayerList([nn.LayerList(list(chunk)) for chunk in chunks])

    def forward(self, x: paddle.Tensor, chunk: int = 0) -> paddle.Tensor:
        """Input of a chunk's first piece → output of its last."""
        for piece in self.chunks[chunk]:
            x = piece(x)
        return x


class Embedding(nn.Layer):
    """The word embedding, learned positions where a family has them, dropout.

    Args:
        maker: makes the parameters.
        dropout: share.
        positions: adds to [s, b, h] what depends on the place in the sequence; None: nothing.
    """

    def __init__(self, maker: ParameterMaker, dropout: float, positions: nn.Layer | None = None):
        super().__init__()
        self.word = ParallelEmbedding(WORD_EMBEDDING, maker)
        self.positions = positions
        self.dropout = Dropout(dropout, maker.residual_stream, maker.tracker)

    def forward(self, ids: paddle.Tensor) -> paddle.Tensor:
        """ids int64 [b, s] → [s, b, h]."""
        x = self.word(ids.transpose([1, 0]))
        return self.dropout(x if self.positions is None else self.positions(x))


class PieceMaker:
    """Makes the pieces of a model. A family says which norm, MLP and positions; the rest is the same for all.

    Args:
        config: the run's configuration.
        tracker: the random streams, seeded.
        edges: where values are cut over groups.
    """

    #: turns queries and keys by their positions; None: positions come with the embedding
    rotary: Rotary | None = None

    def __init__(self, config: Config, tracker: RNGStatesTracker, edges: Edges):
        self.config = config
        self.maker = ParameterMaker(registry.parameters(config), tracker, edges)
        self.plan = RecomputePlan(config.derived.recompute_granularity, config.derived.no_recompute_layers)

    # ---- what a family says

    def norm(self, path: str) -> nn.Layer:
        """A normalisation."""
        raise NotImplementedError

    def mlp(self, path: str) -> nn.Layer:
        """The feed-forward part of a block."""
        raise NotImplementedError

    def positions(self) -> nn.Layer | None:
        """Learned positions."""
        return None

    # ---- the same for all

    def model(self, stage: tuple[int, int]) -> PieceList:
        """The pieces of one stage (number, count)."""
        number, count = stage
        num_chunks = self.config.Model.virtual_pp_degree if count > 1 else 1
        chunks: list[list[nn.Layer]] = [
            [self._block(block) for block in blocks]
            for blocks in stage_blocks(self.config.Model.num_layers, count, num_chunks, number)
        ]
        first = None
        if number == 0:
            first = Embedding(self.maker, self.config.Model.hidden_dropout_prob, self.positions())
            chunks[0].insert(0, first)
        if number == count - 1:
            chunks[-1] += [self.norm(FINAL_NORM), self._head(first)]
        return PieceList(chunks)

    def _block(self, number: int) -> Block:
        path, maker = f"blocks.{number}", self.maker
        attention = CausalSelfAttention(f"{path}.attention", self._attention_options(number), maker, self.plan, number)
        dropout = Dropout(self.config.Model.hidden_dropout_prob, maker.residual_stream, maker.tracker)
        norms = self.norm(f"{path}.norm1"), self.norm(f"{path}.norm2")
        return Block(norms, attention, self.mlp(f"{path}.mlp"), dropout, self.plan, number)

    def _attention_options(self, number: int) -> AttentionOptions:
        model = self.config.Model
        return AttentionOptions(
            heads=model.num_attention_heads,
            kv_heads=self.config.derived.num_key_value_heads,
            head_dim=model.hidden_size // model.num_attention_heads,
            dropout=model.attention_probs_dropout_prob,
            qk_divisor=number + 1 if model.scale_qk_by_layer_num else 1,
            rotary=self.rotary,
            fused_qkv=model.fuse_attn_qkv,
            fused_linear=model.fused_linear,
            fused_softmax=model.fused_softmax_with_triangular,
            flash=model.use_flash_attn,
        )

    def _head(self, first: Embedding | None) -> ParallelHead:
        """The head; a tied one holds the embedding's own Parameter, or, on a stage without it, one of the same logical name."""
        if self.maker.specs[HEAD].tied_to is None:
            weight = self.maker.create(nn.Layer(), HEAD)
        else:
            weight = self.maker.create(nn.Layer(), WORD_EMBEDDING) if first is None else first.word.weight
        return ParallelHead(weight, self.maker.edges)
