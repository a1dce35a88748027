"""Smaller parts of Fleet that take a CPU for an error.

Stands in for `pp_layers.recompute_hybrid`, `broadcast_input_data` in two modules and `ParallelEnv._device_id` (private.py
says when they can go), and for `core.nccl_version`, which a Paddle without CUDA lacks and `dist.all_reduce` calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
import paddle.distributed as dist
from paddle.base import core
from paddle.distributed import parallel
from paddle.distributed.fleet.meta_parallel import tensor_parallel
from paddle.distributed.fleet.meta_parallel.parallel_layers import pp_layers
from paddle.distributed.fleet.utils import hybrid_parallel_util, recompute


def install() -> None:
    """Put the parts below into Paddle. Local; a second call changes nothing."""
    pp_layers.recompute_hybrid = recompute_hybrid
    hybrid_parallel_util.broadcast_input_data = tensor_parallel.broadcast_input_data = broadcast_input_data
    parallel.ParallelEnv._device_id = 0  # PipelineLayer asks for it; on CPU Paddle sets none
    if not hasattr(core, "nccl_version"):
        # dist.all_reduce asks it whether AVG exists; here it does (collectives.py).
        core.nccl_version = lambda: 21000  # type: ignore[attr-defined]


def recompute_hybrid(context: Any, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Fleet's recompute for pipelines, without what `context` asks for: to move or cut activations has no use on CPU."""
    return recompute(function, *arguments, **options)


def broadcast_input_data(hybrid: Any, *inputs: Any, **named: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace the tensors in `inputs` and `named`, nested in lists, tuples and dicts or not, by those of mp rank 0.

    Every mp rank calls it with tensors of the same shapes and dtypes. One broadcast a tensor.
    """
    group, source = hybrid.get_model_parallel_group(), hybrid.get_model_parallel_group_src_rank()
    waiting: list[Any] = [*inputs, *named.values()]
    while waiting:
        one = waiting.pop()
        if isinstance(one, paddle.Tensor):
            dist.broadcast(one, src=source, group=group)
        elif isinstance(one, dict):
            waiting.extend(one.values())
        elif isinstance(one, (list, tuple)):
            waiting.extend(one)
    return inputs, named
