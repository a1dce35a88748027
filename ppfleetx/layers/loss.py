"""Cross entropy over a vocabulary that tensor parallelism may cut."""

from __future__ import annotations

import paddle
import paddle.nn.functional as F
from paddle import nn


class ParallelCrossEntropy(nn.Layer):
    """−log softmax(logits)[label], in float32, with the vocabulary padding taken out of the softmax.

    Args:
        vocab_size: columns that are tokens; further ones are padding. They are cut off rather than masked: Paddle's softmax
            clips what it exponentiates, so that masked columns would get gradients of about 1e-30 instead of none.
    """

    def __init__(self, vocab_size: int):
        super().__init__()
        self.vocab_size = vocab_size

    def forward(self, logits: paddle.Tensor, labels: paddle.Tensor) -> paddle.Tensor:
        """logits [s, b, V], labels int64 [s, b] in 0..vocab_size-1 → losses float32 [s, b]."""
        if logits.shape[-1] > self.vocab_size:
            logits = logits[..., : self.vocab_size]
        return F.cross_entropy(logits.astype("float32"), labels, reduction="none")
