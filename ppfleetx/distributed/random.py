"""Named random streams. There is one store of them: the tracker that Fleet's own layers use is ours."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import paddle
from paddle.distributed.fleet.layers.mpu import random as fleet_random

from ppfleetx.distributed import rng_state
from ppfleetx.distributed.init_stream import InitStream
from ppfleetx.distributed.seeds import Seeds, rank_seeds
from ppfleetx.distributed.topology import Topology

MODEL_PARALLEL_RNG: str = fleet_random.MODEL_PARALLEL_RNG


class RNGStatesTracker(fleet_random.RNGStatesTracker):
    """Random streams by name, isolated from each other and from the caller's stream, on the current device.

    `with tracker.rng_state(name):` (Fleet's own; default name `model_parallel_rng`, ValueError for an unknown name)
    draws from a stream and puts the caller's stream back on leaving, even after an exception; the stream goes on
    where it stopped. Entering and leaving cost 6 µs together. Streams belong to the device that was current when they
    were added: set the device first. Nothing here communicates.
    """

    def __init__(self) -> None:
        super().__init__()
        self._init_seed: int | None = None

    def reset(self) -> None:
        """Forget all streams, their seeds and the init seed."""
        super().reset()
        self._init_seed = None

    def add(self, name: str, seed: int) -> None:
        """Start a new stream; the caller's stream does not move.

        Raises:
            ValueError: the name or the seed was added before, or the seed is no integer from 0 to 2^64 - 1. A refused
                stream leaves no trace (Fleet's own tracker, as of Paddle 3.3.1, keeps the seed).
        """
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64:
            raise ValueError(f"seed {seed!r} of state {name} must be an integer from 0 to 2^64 - 1")
        if name in self.states_:
            raise ValueError(f"state {name} already exists")
        if seed in self.seeds_:
            raise ValueError(f"seed {seed} already exists")
        # paddle.seed seeds the CPU generator too, whose stream is the caller's when the device is another one
        host_state = paddle.get_rng_state("cpu")
        self.states_[name] = self._register(seed)
        if paddle.get_device() != "cpu":
            paddle.set_rng_state(host_state, "cpu")
        self.seeds_.add(seed)

    def set_states_tracker(self, states: Mapping[str, list[Any]]) -> None:
        """Make the streams exactly those of `states`, as `get_states_tracker()` gave them: streams that are missing
        here are made, streams that `states` lacks are dropped, and the seeds in use follow.

        Raises:
            ValueError: `states` is not of that form; nothing is changed then.
        """
        generator_state = type(paddle.get_rng_state()[0])
        for name, state in states.items():
            if not isinstance(state, list) or not state or not all(isinstance(one, generator_state) for one in state):
                raise ValueError(f"state {name} must be a list of generator states")
        for name in [name for name in self.states_ if name not in states]:
            del self.states_[name]
        for name in [name for name in states if name not in self.states_]:
            self.states_[name] = self._register()
        super().set_states_tracker(states)
        index = rng_state.generator_index()
        self.seeds_ = {state[index].current_seed() for state in states.values()}

    def _register(self, seed: int | None = None) -> list[int]:
        """Make one more place for a stream in the device's generator, seeded; gives what finds it again."""
        outside = paddle.incubate.get_rng_state(use_index=True)
        try:
            index: list[int] = paddle.incubate.register_rng_state_as_index()
            if seed is not None:
                paddle.seed(seed)
        finally:
            paddle.incubate.set_rng_state(outside, use_index=True)
        return index

    def set_init_seed(self, seed: int) -> None:
        """The seed of all init streams of this run."""
        self._init_seed = seed

    def init_stream(self, name: str) -> InitStream:
        """Where the initial values of the logical parameter `name` come from; the same on every rank and layout."""
        if self._init_seed is None:
            raise RuntimeError("init_stream needs a seed: call seed_streams or set_init_seed before building the model")
        return InitStream(self._init_seed, name)

    def state_dict(self) -> dict[str, Any]:
        """Every random state of this process as JSON values: the streams, Paddle's default generators, the host's."""
        index = rng_state.generator_index()
        streams = self.get_states_tracker()
        return {
            "device": _device_kind(),
            "init_seed": self._init_seed,
            "default": rng_state.encode_generator(paddle.get_rng_state()[index]),
            "default_cpu": rng_state.encode_generator(paddle.get_rng_state("cpu")[0]),
            "streams": {name: rng_state.encode_generator(state[index]) for name, state in streams.items()},
            "host": rng_state.encode_host(),
        }

    def load_state_dict(self, state: Any) -> None:
        """Restore what `state_dict` gave, to the bit, in this or another process on the same kind of device.

        Raises:
            ValueError: `state` is malformed or from another kind of device; nothing is changed then.
        """
        keys = {"device", "init_seed", "default", "default_cpu", "streams", "host"}
        if not isinstance(state, dict) or set(state) != keys or not isinstance(state["streams"], dict):
            raise ValueError(f"a random state must hold exactly {sorted(keys)}")
        if state["device"] != _device_kind():
            raise ValueError(f"the random state is from {state['device']!r}, this process runs on {_device_kind()!r}")
        if state["init_seed"] is not None and not isinstance(state["init_seed"], int):
            raise ValueError("the init_seed of a random state must be an integer or null")
        default = _with_own_state(state["default"])
        default_cpu = rng_state.decode_generator(state["default_cpu"], paddle.get_rng_state("cpu")[0])
        streams = {name: _with_own_state(stream) for name, stream in state["streams"].items()}
        rng_state.restore_host(state["host"])
        paddle.set_rng_state([default_cpu], "cpu")
        paddle.set_rng_state(default)
        self.set_states_tracker(streams)
        self._init_seed = state["init_seed"]


def _device_kind() -> str:
    return str(paddle.get_device().partition(":")[0])


def _with_own_state(value: Any) -> list[Any]:
    """The current states of all visible devices, with `value` in the place of this process's own."""
    states: list[Any] = paddle.get_rng_state()
    index = rng_state.generator_index()
    states[index] = rng_state.decode_generator(value, states[index])
    return states


def _take_over_fleets_tracker() -> RNGStatesTracker:
    """Put our tracker where Fleet keeps its own.

    Private name: the module global `RNG_STATE_TRACKER`. Every user in Paddle 3.3.1 (mp layers, recompute, the pipeline
    builder, sequence parallel) asks that module's get_rng_state_tracker() at each use, so replacing the one global
    leaves a single store. It can go when Paddle lets the tracker be set.
    """
    tracker, fleets = RNGStatesTracker(), fleet_random.RNG_STATE_TRACKER
    tracker.states_, tracker.seeds_ = fleets.states_, fleets.seeds_  # of a fleet.init before this import
    fleet_random.RNG_STATE_TRACKER = tracker
    if fleet_random.get_rng_state_tracker() is not tracker:
        raise RuntimeError(f"Paddle {paddle.__version__} keeps its RNG tracker elsewhere than RNG_STATE_TRACKER")
    return tracker


_TRACKER = _take_over_fleets_tracker()


def get_rng_state_tracker() -> RNGStatesTracker:
    """The one tracker of this process, which Fleet's own layers use too."""
    return _TRACKER


def seed_streams(topology: Topology, seed: int) -> Seeds:
    """Seed every random stream of this process by rule B32 and name the streams; called once, after ParallelContext.

    Adds `model_parallel_rng` (Fleet's mp layers need it), `global_seed` and `local_seed`; seeds Paddle's default
    generators with the global seed, Python's and NumPy's with the host seed, and the init streams with `seed`.
    """
    own = rank_seeds(topology, seed)
    tracker = get_rng_state_tracker()
    tracker.reset()  # fleet.init adds model_parallel_rng by itself when mp_degree > 1
    tracker.set_init_seed(seed)
    tracker.add(MODEL_PARALLEL_RNG, own.model_parallel_seed)
    tracker.add("global_seed", own.global_seed)
    tracker.add("local_seed", own.local_seed)
    paddle.seed(own.global_seed)
    random.seed(own.host_seed)
    np.random.seed(own.host_seed % 2**32)  # NumPy takes 32 bits
    return own
