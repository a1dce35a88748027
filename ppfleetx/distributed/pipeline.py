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

#: computes micro-batch i: the first stage gets None, the others the activation of the stage before; the last stage returns
#: the loss to differentiate, the others an activation
StageFunction = Callable[[int, "paddle.Tensor | None"], paddle.Tensor]


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

    def train(self, num_micro_batches: int, forward: StageFunction) -> None:
        """Forward and backward of all micro-batches; gradients add up in the parameters. Every stage must call it.

        A stage holds the activations of at most num_stages − stage micro-batches.
        """
        ahead = min(self.num_stages - self.stage - 1, num_micro_batches)
        waiting: deque[tuple[paddle.Tensor | None, paddle.Tensor]] = deque()
        for number in range(ahead):
            received = self._exchange(receive_activation=True)[0]
            result = forward(number, received)
            self._exchange(send_activation=result)
            waiting.append((received, result))
        received = self._exchange(receive_activation=True)[0] if ahead < num_micro_batches else None
        for number in range(ahead, num_micro_batches):
            result = forward(number, received)
            waiting.append((received, result))
            gradient = self._exchange(send_activation=result, receive_gradient=True)[1]
            passed = _backward(*waiting.popleft(), gradient)
            more = number + 1 < num_micro_batches
            received = self._exchange(send_gradient=passed, receive_activation=more)[0]
        while waiting:
            gradient = self._exchange(receive_gradient=True)[1]
            self._exchange(send_gradient=_backward(*waiting.popleft(), gradient))

    def evaluate(self, num_micro_batches: int, forward: StageFunction) -> list[paddle.Tensor]:
        """Forward of all micro-batches without gradients: their results on the last stage, [] on the others."""
        results = []
        with paddle.no_grad():
            for number in range(num_micro_batches):
                result = forward(number, self._exchange(receive_activation=True)[0])
                if self.is_last:
                    results.append(result)
                else:
                    self._exchange(send_activation=result)
        return results

    def _exchange(
        self,
        send_activation: paddle.Tensor | None = None,
        send_gradient: paddle.Tensor | None = None,
        receive_activation: bool = False,
        receive_gradient: bool = False,
    ) -> tuple[paddle.Tensor | None, paddle.Tensor | None]:
        """Posts the sends and receives of one moment together, so that neighbours cannot block each other; what has no
        neighbour to go to or come from is left out. Returns (activation, gradient) received."""
        if self._group is None:
            return None, None
        ranks, stage = self._group.ranks, self.stage
        operations, activation, gradient = [], None, None
        if send_activation is not None and not self.is_last:
            value = send_activation.detach().astype(self._dtype).contiguous()
            operations.append(dist.P2POp(dist.isend, value, ranks[stage + 1], self._group))
        if send_gradient is not None and not self.is_first:
            operations.append(dist.P2POp(dist.isend, send_gradient.contiguous(), ranks[stage - 1], self._group))
        if receive_activation and not self.is_first:
            activation = paddle.empty(self._shape, self._dtype)
            operations.append(dist.P2POp(dist.irecv, activation, ranks[stage - 1], self._group))
        if receive_gradient and not self.is_last:
            gradient = paddle.empty(self._shape, self._dtype)
            operations.append(dist.P2POp(dist.irecv, gradient, ranks[stage + 1], self._group))
        if operations:
            for task in dist.batch_isend_irecv(operations):
                task.wait()
        if activation is not None:
            activation.stop_gradient = False
        return activation, gradient


def _backward(
    received: paddle.Tensor | None, result: paddle.Tensor, gradient: paddle.Tensor | None
) -> paddle.Tensor | None:
    """Backward of one micro-batch; gives the gradient of what was received."""
    if gradient is None:
        result.backward()
    else:
        paddle.autograd.backward([result], [gradient.astype(result.dtype)])
    return None if received is None else received.grad


def stage_blocks(num_blocks: int, num_stages: int, stage: int) -> range:
    """The blocks of a stage: as even as they come, earlier stages one more where it does not divide."""
    share, more = divmod(num_blocks, num_stages)
    first = stage * share + min(stage, more)
    return range(first, first + share + (stage < more))
