"""The RNG tracker: isolation, one store with Fleet, and states that survive as JSON."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import paddle
import pytest
from paddle.distributed.fleet.layers.mpu import random as fleet_random
from paddle.distributed.fleet.meta_parallel import get_rng_state_tracker as fleet_getter

from ppfleetx.distributed import RNGStatesTracker, Topology, get_rng_state_tracker, seed_streams
from ppfleetx.distributed.init_stream import InitStream
from ppfleetx.distributed.random import MODEL_PARALLEL_RNG
from tests.launch import REPO


@pytest.fixture
def tracker():
    tracker = get_rng_state_tracker()
    tracker.reset()
    paddle.seed(11)
    yield tracker
    tracker.reset()


def draw(n=4):
    return paddle.rand([n]).tolist()


def draw_in(tracker, name, n=4):
    with tracker.rng_state(name):
        return draw(n)


def test_there_is_one_store(tracker):
    assert fleet_getter() is tracker
    assert fleet_random.RNG_STATE_TRACKER is tracker
    assert isinstance(tracker, RNGStatesTracker)
    tracker.add("x", 5)
    inside = draw_in(tracker, "x")
    paddle.seed(5)
    assert draw() == inside
    with pytest.raises(ValueError):
        fleet_getter().add("x", 6)


def test_adding_leaves_the_callers_stream(tracker):
    expected = draw() + draw()
    paddle.seed(11)
    first = draw()
    tracker.add("x", 5)
    assert first + draw() == expected


def test_streams_are_isolated_and_go_on(tracker):
    tracker.add("a", 1)
    tracker.add("b", 2)
    paddle.seed(1)
    a = draw(8)
    paddle.seed(2)
    b = draw(8)
    paddle.seed(11)
    outside = draw(8)
    paddle.seed(11)
    got_a, got_b, got_outside = [], [], []
    for _ in range(2):
        got_a += draw_in(tracker, "a")
        got_outside += draw()
        got_b += draw_in(tracker, "b")
    assert (got_a, got_b, got_outside) == (a, b, outside)


def test_the_callers_stream_comes_back_after_an_exception(tracker):
    tracker.add("a", 1)
    expected = draw(8)
    paddle.seed(11)
    first = draw()
    with pytest.raises(KeyError), tracker.rng_state("a"):
        used = draw()
        raise KeyError
    assert first + draw() == expected
    paddle.seed(1)
    assert used + draw_in(tracker, "a") == draw(8)


def test_streams_nest(tracker):
    tracker.add("a", 1)
    tracker.add("b", 2)
    paddle.seed(1)
    a = draw(12)
    got = []
    with tracker.rng_state("a"):
        got += draw()
        with tracker.rng_state("b"):
            draw()
        with tracker.rng_state("a"):
            got += draw()
        got += draw()
    assert got == a


def test_default_name_and_unknown_names(tracker):
    tracker.add(MODEL_PARALLEL_RNG, 3)
    paddle.seed(3)
    expected = draw()
    with tracker.rng_state():
        assert draw() == expected
    with pytest.raises(ValueError, match="nobody"), tracker.rng_state("nobody"):
        pass


def test_a_refused_add_leaves_no_trace(tracker):
    tracker.add("a", 1)
    with pytest.raises(ValueError, match="seed 1 "):
        tracker.add("b", 1)
    with pytest.raises(ValueError, match="state a "):
        tracker.add("a", 2)
    for bad in (-1, 2**64, 1.0, "1", True, None):
        with pytest.raises(ValueError, match="integer"):
            tracker.add("c", bad)
    tracker.add("b", 2)  # neither the name nor the seed was kept
    tracker.add("c", 2**64 - 1)
    assert set(tracker.get_states_tracker()) == {"a", "b", "c"}


def test_states_are_restored_completely(tracker):
    tracker.add("a", 1)
    tracker.add("b", 2)
    draw_in(tracker, "a")
    states = tracker.get_states_tracker()
    expected = draw_in(tracker, "a"), draw_in(tracker, "b")
    tracker.set_states_tracker(states)
    assert (draw_in(tracker, "a"), draw_in(tracker, "b")) == expected

    tracker.reset()
    tracker.add("other", 7)
    tracker.set_states_tracker(states)
    assert set(tracker.get_states_tracker()) == {"a", "b"}
    assert (draw_in(tracker, "a"), draw_in(tracker, "b")) == expected
    with pytest.raises(ValueError, match="seed 1 "):
        tracker.add("c", 1)  # the seeds in use came back too
    tracker.add("c", 7)


@pytest.mark.parametrize("bad", [{"a": None}, {"a": []}, {"a": [1]}, {"a": [b"x"]}])
def test_malformed_states_change_nothing(tracker, bad):
    tracker.add("a", 1)
    expected = draw_in(tracker, "a")
    tracker.reset()
    tracker.add("a", 1)
    with pytest.raises(ValueError, match="state a"):
        tracker.set_states_tracker(bad)
    assert draw_in(tracker, "a") == expected


def test_fleets_recompute_uses_the_streams(tracker):
    """Recompute restores the streams of its forward pass, so dropout inside it is repeated exactly."""
    from paddle.distributed.fleet.utils import recompute

    tracker.add("global_seed", 5)
    masks = []

    def block(x):
        with tracker.rng_state("global_seed"):
            y = paddle.nn.functional.dropout(x, 0.5)
        masks.append((y != 0).numpy())
        return y * 2

    x = paddle.ones([64])
    x.stop_gradient = False
    recompute(block, x).sum().backward()
    assert len(masks) == 2
    np.testing.assert_array_equal(masks[0], masks[1])
    np.testing.assert_array_equal(x.grad.numpy() != 0, masks[0])


def everything(tracker):
    import random

    streams = {name: draw_in(tracker, name) for name in tracker.get_states_tracker()}
    return [streams, draw(), random.random(), float(np.random.rand())]


def test_state_dict_is_bit_exact_in_another_process(tracker, tmp_path):
    seed_streams(Topology(0, 1), 1024)
    everything(tracker)
    paddle.randn([7])
    np.random.randn(1)  # leaves a second number in store, which is part of NumPy's state
    state = json.loads(json.dumps(tracker.state_dict()))
    path = tmp_path / "state.json"
    path.write_text(json.dumps(state))
    expected = everything(tracker)

    assert tracker.state_dict() != state
    tracker.load_state_dict(state)
    assert tracker.state_dict() == state
    assert everything(tracker) == expected

    script = (
        "import json, sys; from tests.unit.distributed.test_rng_tracker import everything, get_rng_state_tracker\n"
        "get_rng_state_tracker().load_state_dict(json.load(open(sys.argv[1]))); \n"
        "print(json.dumps(everything(get_rng_state_tracker())))"
    )
    shown = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, path], capture_output=True, text=True, check=True, cwd=REPO
    )
    assert json.loads(shown.stdout) == expected


def corrupt(state, path, value):
    for key in path[:-1]:
        state = state[key]
    state[path[-1]] = value


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["default"], None),
        (["default", "engine"], "1 2 3"),
        (["default", "engine"], "x " * 312 + "5"),
        (["default", "engine"], "1 " * 312 + "313"),
        (["default", "engine"], "18446744073709551616 " * 312 + "5"),
        (["default", "seed"], -1),
        (["default", "offset"], "0"),
        (["default_cpu", "more"], 1),
        (["streams"], []),
        (["streams", "global_seed"], {}),
        (["device"], "gpu"),
        (["init_seed"], "1024"),
        (["host"], {}),
        (["host", "python"], [3, [1, 2], None]),
        (["host", "numpy"], ["MT19937", [1], 0, 0, 0.0]),
        (["extra"], 1),
    ],
)
def test_malformed_state_dicts_change_nothing(tracker, path, value):
    seed_streams(Topology(0, 1), 1024)
    before = tracker.state_dict()
    state = json.loads(json.dumps(before))
    draw_in(tracker, "global_seed")
    now = tracker.state_dict()
    corrupt(state, path, value)
    with pytest.raises(ValueError):
        tracker.load_state_dict(state)
    assert tracker.state_dict() == now


def test_seed_streams(tracker):
    tracker.add(MODEL_PARALLEL_RNG, 99)  # as fleet.init does with mp
    own = seed_streams(Topology(3, 4, mp_degree=2), 1024)
    assert (own.global_seed, own.local_seed) == (2054, 2059)
    for name, seed in [(MODEL_PARALLEL_RNG, 1026), ("global_seed", 2054), ("local_seed", 2059)]:
        got = draw_in(tracker, name)
        paddle.seed(seed)
        assert got == draw()
    seed_streams(Topology(3, 4, mp_degree=2), 1024)
    first = everything(tracker)
    seed_streams(Topology(3, 4, mp_degree=2), 1024)
    assert everything(tracker) == first


def test_init_streams_know_the_runs_seed(tracker):
    with pytest.raises(RuntimeError, match="seed"):
        tracker.init_stream("w")
    for rank in (0, 3):
        seed_streams(Topology(rank, 4, mp_degree=2), 1024)
        got = tracker.init_stream("w").normal([5])
        np.testing.assert_array_equal(got, InitStream(1024, "w").normal([5]))
