"""Pipeline parallelism: the 1F1B schedule (Narayanan et al. 2021, section 2.2.1) over any function of a stage.

Own code rather than Fleet's PipelineLayer: the stages hold the same pieces as one process does, a tied weight is one logical
parameter on two stages, the loss is the engine's, and CPU and GPU run the same lines. A run without pipeline is a pipeline of
one stage.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import paddle
import paddle.distributed as dist

if TYPE_CHECKING:
    from paddle.distributed.communication.group import Group

#: computes a micro-batch (number, activation of the place before or None at the start, chunk) on this stage: gives an
#: activation, or at the end of the model the loss to differentiate
StageFunction = Callable[[int, "paddle.Tensor | None", int], paddle.Tensor]


class Pipeline:
    """One stage among others.

    Args:
        group: the pipeline's ranks in stage order; None: one stage.
        shape: shape of the activations between stages.
        dtype: their type.
    """

    def __init__(self, group: Group | None, shape: Sequence[int], dtype: str = "float32"):
        self._group = group
        self._shape, self._dtype = list(shape), dtype
        self.stage = 0 if group is None else group.rank
        self.num_stages = 1 if group is None else group.nranks

    @property
    def is_first(self) -> bool:
        """Whether this stage reads the data."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage computes the loss."""
        return self.stage == self.num_stages - 1

    def is_end(self, chunk: int) -> bool:
        """Whether a chunk of this stage computes the loss."""
        return self.is_last

    def train(self, num_micro_batches: int, forward: StageFunction) -> None:
        """Forward and backward of all micro-batches; gradients add up in the parameters. Every stage must call it.

        A stage holds the activations of at most num_stages − stage micro-batches.
        """
        first, last = self.is_first, self.is_last
        ahead = min(self.num_stages - self.stage - 1, num_micro_batches)
        waiting: deque[tuple[paddle.Tensor | None, paddle.Tensor]] = deque()
        for number in range(ahead):
            received = self.exchange(from_before=not first)[0]
            result = forward(number, received, 0)
            self.exchange(to_next=result)
            waiting.append((received, result))
        received = self.exchange(from_before=not first and ahead < num_micro_batches)[0]
        for number in range(ahead, num_micro_batches):
            result = forward(number, received, 0)
            waiting.append((received, result))
            gradient = self.exchange(to_next=None if last else result, from_next=not last)[1]
            passed = backward(*waiting.popleft(), gradient)
            more = number + 1 < num_micro_batches
            received = self.exchange(to_before=passed, from_before=more and not first)[0]
        while waiting:
            gradient = self.exchange(from_next=True)[1]
            self.exchange(to_before=backward(*waiting.popleft(), gradient))

    def evaluate(self, num_micro_batches: int, forward: StageFunction) -> list[paddle.Tensor]:
        """Forward of all micro-batches without gradients: their results on the last stage, [] on the others."""
        results = []
        with paddle.no_grad():
            for number in range(num_micro_batches):
                result = forward(number, self.exchange(from_before=not self.is_first)[0], 0)
                if self.is_last:
                    results.append(result)
                else:
                    self.exchange(to_next=result)
        return results

    def exchange(
        self,
        to_next: paddle.Tensor | None = None,
        to_before: paddle.Tensor | None = None,
        from_before: bool = False,
        from_next: bool = False,
    ) -> tuple[paddle.Tensor | None, paddle.Tensor | None]:
        """Posts the sends and receives of one moment together, so that neighbours cannot block each other.

        Activations go to the next stage (from the last to the first where stages hold several chunks), gradients to the
        stage before. Returns (activation, gradient) received.
        """
        if self._group is None:
            return None, None
        before = self._group.ranks[self.stage - 1]
        after = self._group.ranks[(self.stage + 1) % self.num_stages]
        operations, activation, gradient = [], None, None
        for value, peer in ((to_next, after), (to_before, before)):
            if value is not None:
                value = value.detach().astype(self._dtype).contiguous()
                operations.append(dist.P2POp(dist.isend, value, peer, self._group))
        if from_before:
            activation = paddle.empty(self._shape, self._dtype)
            operations.append(dist.P2POp(dist.irecv, activation, before, self._group))
        if from_next:
            gradient = paddle.empty(self._shape, self._dtype)
            operations.append(dist.P2POp(dist.irecv, gradient, after, self._group))
        if operations:
            for task in dist.batch_isend_irecv(operations):
                task.wait()
        if activation is not None:
            activation.stop_gradient = False
        return activation, gradient


def backward(
    received: paddle.Tensor | None, result: paddle.Tensor, gradient: paddle.Tensor | None
) -> paddle.Tensor | None:
    """Backward of one micro-batch (gradient None: `result` is the loss); gives the gradient of what was received."""
    if gradient is None:
        result.backward()
    else:
        paddle.autograd.backward([result], [gradient.astype(result.dtype)])
    return None if received is None else received.grad


def stage_blocks(num_blocks: int, num_stages: int, num_chunks: int, stage: int) -> list[range]:
    """The blocks of each chunk of a stage: as even as they come, earlier places one more where it does not divide."""
    places = num_stages * num_chunks
    share, more = divmod(num_blocks, places)
    chunks = []
    for chunk in range(num_chunks):
        place = chunk * num_stages + stage
        first = place * share + min(place, more)
        chunks.append(range(first, first + share + (place < more)))
    return chunks
