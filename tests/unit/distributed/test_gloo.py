"""The CPU backend's guard on Paddle's version and private names."""

from __future__ import annotations

import subprocess
import sys

import paddle
import pytest

from ppfleetx.config.errors import UserError
from ppfleetx.distributed.gloo import private


def test_this_paddle_is_supported():
    private.check()
    for name in private.PRIVATE_NAMES:
        assert name.purpose and name.can_go_when


@pytest.mark.parametrize("version", ["3.2.2", "3.4.0", "2.6.1", "0.0.0"])
def test_other_versions_are_refused_by_name(monkeypatch, version):
    monkeypatch.setattr(paddle, "__version__", version)
    with pytest.raises(UserError, match=f"{version}.*\n.*from 3.3.1 to below 3.4"):
        private.check()


def test_a_missing_name_is_named(monkeypatch):
    gone = private.PrivateName("paddle.distributed.collective", "_gone.away", "made up", "never")
    monkeypatch.setattr(private, "PRIVATE_NAMES", (gone,))
    with pytest.raises(RuntimeError, match=rf"{paddle.__version__} lacks paddle.distributed.collective._gone.away"):
        private.check()


def test_no_two_lanes_share_a_number():
    """Groups of 2, 4 and 8 ranks of a job of 8, such as a pipeline's and sharding's. Counted to the base of a group's own
    size, 5 → 1 of the eight (5 · 8 + 1) was 0 → 1 of a two with number 10 ((10 · 2 + 0) · 2 + 1)."""
    from ppfleetx.distributed.gloo.point_to_point import lane_id

    sizes = {0: 8, **dict.fromkeys(range(1, 9), 4), **dict.fromkeys(range(9, 40), 2)}
    numbers = [
        lane_id(group_id, source, destination, 8)
        for group_id, size in sizes.items()
        for source in range(size)
        for destination in range(size)
    ]
    assert len(set(numbers)) == len(numbers) == 64 + 8 * 16 + 31 * 4 and min(numbers) > 1000


def test_what_is_replaced_is_listed_and_a_second_install_changes_nothing():
    """In a process of its own, since the parts stay installed."""
    script = """
from importlib import import_module
from paddle.base import core
from ppfleetx.distributed import gloo
from ppfleetx.distributed.gloo import private
from ppfleetx.distributed.store import JobStore

listed = {(one.module, one.name) for one in private.PRIVATE_NAMES}
modules = {name: import_module(name) for name in sorted({one.module for one in private.PRIVATE_NAMES})}

def state():
    found = {(module, name): value for module in modules for name, value in vars(modules[module]).items()}
    methods = {name: getattr(core.ProcessGroupGloo, name) for name in dir(core.ProcessGroupGloo)}
    found.update({("paddle.base.core", f"ProcessGroupGloo.{name}"): value for name, value in methods.items()})
    return {key: value for key, value in found.items() if not key[1].startswith(("__", "ProcessGroupGloo.__"))}

def changed(before, after):
    return {key for key in before if after[key] is not before[key]}

before = state()
store = JobStore(None, 0, 1)
gloo.install(store)
once = state()
replaced = changed(before, once)
assert replaced <= listed, replaced - listed
print(sorted(name for _, name in listed - replaced))
gloo.install(store)
assert not changed(once, state()), changed(once, state())
from ppfleetx.distributed.gloo import collectives, point_to_point
raw = [*collectives._raw.values(), point_to_point._raw_send, point_to_point._raw_recv]
assert all(type(one).__name__ == "instancemethod" for one in raw), raw
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['ParallelEnv.device_id', 'ProcessGroupGloo.create']"  # used, not replaced
