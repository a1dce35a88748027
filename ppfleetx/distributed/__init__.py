"""The ranks of a run: who they are, how they meet, what they draw.

Names load on first use (PEP 562), so that `from ppfleetx.distributed import Topology` imports no Paddle.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ppfleetx.distributed.collectives import all_gather_ints, all_reduce_sum_, average_gradients, broadcast_
    from ppfleetx.distributed.context import ParallelContext
    from ppfleetx.distributed.device import check_device
    from ppfleetx.distributed.init_stream import InitStream
    from ppfleetx.distributed.random import MODEL_PARALLEL_RNG, RNGStatesTracker, get_rng_state_tracker, seed_streams
    from ppfleetx.distributed.seeds import Seeds, rank_seeds
    from ppfleetx.distributed.topology import AXES, GroupInfo, Topology

#: public name -> module that holds it
_MODULE_OF = {
    "AXES": "topology",
    "GroupInfo": "topology",
    "Topology": "topology",
    "Seeds": "seeds",
    "rank_seeds": "seeds",
    "InitStream": "init_stream",
    "MODEL_PARALLEL_RNG": "random",
    "RNGStatesTracker": "random",
    "get_rng_state_tracker": "random",
    "seed_streams": "random",
    "ParallelContext": "context",
    "check_device": "device",
    "all_gather_ints": "collectives",
    "all_reduce_sum_": "collectives",
    "average_gradients": "collectives",
    "broadcast_": "collectives",
}

__all__ = [
    "AXES",
    "MODEL_PARALLEL_RNG",
    "GroupInfo",
    "InitStream",
    "ParallelContext",
    "RNGStatesTracker",
    "Seeds",
    "Topology",
    "all_gather_ints",
    "all_reduce_sum_",
    "average_gradients",
    "broadcast_",
    "check_device",
    "get_rng_state_tracker",
    "rank_seeds",
    "seed_streams",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
