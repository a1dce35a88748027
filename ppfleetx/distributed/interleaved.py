"""The interleaved 1F1B schedule (Narayanan et al. 2021, section 2.2.2): each stage holds several chunks of the model.

Chunk c of stage r is place c·p + r of the model, p the number of stages, so that the last stage sends to the first. The
order of work and the moments of exchange are Megatron-LM's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import paddle

from ppfleetx.distributed.pipeline import Pipeline, StageFunction, backward

if TYPE_CHECKING:
    from paddle.distributed.communication.group import Group


class InterleavedPipeline(Pipeline):
    """One stage with `num_chunks` chunks.

    Args:
        group: the pipeline's ranks in stage order, at least 3 (with 2, what comes from the stage before and from the stage
            after cannot be told apart).
        shape, dtype: of the activations between stages.
        num_chunks: chunks of this and every stage.
    """

    def __init__(self, group: Group, shape: Sequence[int], dtype: str, num_chunks: int):
        super().__init__(group, shape, dtype)
        assert self.num_stages > 2 and num_chunks > 1
        self.num_chunks = num_chunks

    def train(self, num_micro_batches: int, forward: StageFunction) -> None:
        """As `Pipeline.train`; the number of micro-batches is a multiple of the number of stages."""
        assert num_micro_batches % self.num_stages == 0
        _Round(self, num_micro_batches, forward).run()

    def evaluate(self, num_micro_batches: int, forward: StageFunction) -> list[paddle.Tensor]:
        """As `Pipeline.evaluate`; micro-batches go one after another through all chunks."""
        results = []
        with paddle.no_grad():
            for number in range(num_micro_batches):
                for chunk in range(self.num_chunks):
                    first, last = self.is_start(chunk), self.is_end(chunk)
                    received = self.exchange(from_before=not first)[0]
                    result = forward(number, received, chunk)
                    if last:
                        results.append(result)
                    else:
                        self.exchange(to_next=result)
        return results

    def is_start(self, chunk: int) -> bool:
        """Whether the chunk reads the data."""
        return self.is_first and chunk == 0

    def is_end(self, chunk: int) -> bool:
        """Whether the chunk computes the loss."""
        return self.is_last and chunk == self.num_chunks - 1


class _Round:
    """One update of one stage. A *turn* is one chunk's forward (or backward) of one micro-batch, counted from 0."""

    def __init__(self, pipeline: InterleavedPipeline, num_micro_batches: int, forward: StageFunction):
        self.pipeline, self._forward = pipeline, forward
        self.stages, self.chunks = pipeline.num_stages, pipeline.num_chunks
        self.turns = num_micro_batches * self.chunks
        ahead = (self.stages - pipeline.stage - 1) * 2 + (self.chunks - 1) * self.stages
        self.ahead = self.turns if num_micro_batches == self.stages else min(ahead, self.turns)
        self.inputs: list[deque[paddle.Tensor | None]] = [deque() for _ in range(self.chunks)]
        self.gradients: list[deque[paddle.Tensor | None]] = [deque() for _ in range(self.chunks)]
        self.waiting: list[deque[tuple[paddle.Tensor | None, paddle.Tensor]]] = [deque() for _ in range(self.chunks)]

    def run(self) -> None:
        """Fill, work in pairs of forward and backward, empty."""
        exchange = self.pipeline.exchange
        self.inputs[0].append(exchange(from_before=not self.pipeline.is_first)[0])
        self._fill()
        self._steady()
        if self.ahead == self.turns:
            self.gradients[-1].append(exchange(from_next=not self.pipeline.is_last)[1])
        self._empty()

    def _fill(self) -> None:
        for turn in range(self.ahead):
            result = self._run_forward(turn)
            following = self._chunk(turn + 1)
            wanted = turn + 1 < self.turns and not self.pipeline.is_start(following)
            last_of_fill = turn + 1 == self.ahead and self.ahead < self.turns
            received, gradient = self.pipeline.exchange(
                to_next=result, from_before=wanted, from_next=last_of_fill and not self.pipeline.is_last
            )
            if turn + 1 < self.turns:
                self.inputs[following].append(received)
            if last_of_fill:
                self.gradients[-1].append(gradient)

    def _steady(self) -> None:
        for turn in range(self.turns - self.ahead):
            result = self._run_forward(turn + self.ahead)
            passed = self._run_backward(turn)
            next_input, want_input = self._next_input(turn + self.ahead)
            next_gradient, want_gradient = self._next_gradient(turn)
            want_input = want_input and turn + self.ahead + 1 < self.turns
            received, gradient = self.pipeline.exchange(
                to_next=result, to_before=passed, from_before=want_input, from_next=want_gradient
            )
            if want_input or self.pipeline.is_first:
                self.inputs[next_input].append(received)
            if want_gradient or self.pipeline.is_last:
                self.gradients[next_gradient].append(gradient)

    def _empty(self) -> None:
        for turn in range(self.turns - self.ahead, self.turns):
            passed = self._run_backward(turn)
            following = self._chunk(turn + 1, backward=True)
            wanted = turn + 1 < self.turns and not self.pipeline.is_end(following)
            gradient = self.pipeline.exchange(to_before=passed, from_next=wanted)[1]
            self.gradients[following].append(gradient)

    def _next_input(self, turn: int) -> tuple[int, bool]:
        """(chunk that the activation arriving after this forward turn is for, whether one arrives)."""
        if not self.pipeline.is_first:
            return self._chunk(turn + 1), True
        sent = self._chunk(turn - (self.stages - 1))  # what the last stage has just computed
        return (sent + 1) % self.chunks, sent != self.chunks - 1

    def _next_gradient(self, turn: int) -> tuple[int, bool]:
        """(chunk that the gradient arriving after this backward turn is for, whether one arrives)."""
        if not self.pipeline.is_last:
            return self._chunk(turn + 1, backward=True), True
        sent = self._chunk(turn - (self.stages - 1), backward=True)
        return (sent - 1) % self.chunks, sent != 0

    def _run_forward(self, turn: int) -> paddle.Tensor | None:
        """The activation to send; None at the end of the model."""
        chunk = self._chunk(turn)
        received = self.inputs[chunk].popleft()
        result = self._forward(self._micro_batch(turn), received, chunk)
        self.waiting[chunk].append((received, result))
        return None if self.pipeline.is_end(chunk) else result

    def _run_backward(self, turn: int) -> paddle.Tensor | None:
        """The gradient to send; None at the start of the model."""
        chunk = self._chunk(turn, backward=True)
        gradient = None if self.pipeline.is_end(chunk) else self.gradients[chunk].popleft()
        return backward(*self.waiting[chunk].popleft(), gradient)

    def _chunk(self, turn: int, backward: bool = False) -> int:
        chunk = turn % (self.stages * self.chunks) // self.stages
        return self.chunks - 1 - chunk if backward else chunk

    def _micro_batch(self, turn: int) -> int:
        return turn // (self.stages * self.chunks) * self.stages + turn % self.stages
