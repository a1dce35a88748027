"""SIGKILL at every point of a save (each open, write, sync, rename, before and after it), on one and on two real processes."""

from __future__ import annotations

import multiprocessing
import shutil
import signal

import numpy as np
import pytest

from ppfleetx.checkpoint.manager import CheckpointManager
from ppfleetx.checkpoint.manifest import verify
from ppfleetx.checkpoint.reader import Checkpoint
from ppfleetx.distributed import ParallelContext, Topology
from tests.crash import saving

#: the survivor of two gets so long to end, which it can only if the other's part was done
SURVIVOR_S = 0.1


@pytest.fixture(scope="module")
def processes():
    """Makes processes quickly: each is a copy of one that has imported all it needs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.crash.saving"])
    with context.Manager() as manager:
        yield context, manager


def saved(processes, folder, step, world, victim=0, struck=None):
    """A save on `world` processes, one of which is killed; the exit code of the victim and its count of disk operations."""
    context, manager = processes
    shared, counts = (manager.dict(), manager.Lock()), [context.SimpleQueue() for _ in range(world)]
    ranks = [
        context.Process(
            target=saving.run,
            args=(counts[rank].put, folder, step, rank, world, shared, struck if rank == victim else None),
        )
        for rank in range(world)
    ]
    for rank in ranks:
        rank.start()
    ranks[victim].join(30)
    for rank in ranks:
        rank.join(SURVIVOR_S if struck else 30)
        rank.kill()
        rank.join()
    return ranks[victim].exitcode, None if struck else counts[victim].get()


def restored(folder):
    """The checkpoint that ckpt_dir=auto takes."""
    manager = CheckpointManager(folder, ParallelContext(Topology(0, 1), "cpu", {}, None))
    return manager.restore("auto", lambda path: lambda: None)


@pytest.mark.parametrize(("world", "victim"), [(1, 0), (2, 0), (2, 1)])
def test_killed_anywhere_auto_finds_the_newest_whole_checkpoint(processes, tmp_path, world, victim):
    code, total = saved(processes, tmp_path, 1, world, victim)
    assert code == 0 and total > (15 if victim == 0 else 8)
    found = []
    for number in range(1, total + 1):
        for after in (False, True):
            code, _ = saved(processes, tmp_path, 2, world, victim, (number, after))
            assert code == -signal.SIGKILL
            path = restored(tmp_path)
            assert verify(path) == []
            step = int(path.name[5:])
            for slot in ("", "moment1"):
                assert np.all(Checkpoint(path).read_whole("a.weight", slot) == step)
            found.append(step)
            for left in ("step_00000002", ".step_00000002.tmp"):  # else the next save would begin by removing it
                shutil.rmtree(tmp_path / left, ignore_errors=True)
    assert found == sorted(found)  # from some point on it is the new one
    if victim == 0:
        assert found.count(2) == 5  # after the rename, and before and after the open and the sync of its folder
    saved(processes, tmp_path, 2, world, victim, (8, True))
    code, _ = saved(processes, tmp_path, 2, world, victim)
    assert code == 0 and sorted(path.name for path in tmp_path.iterdir()) == ["step_00000001", "step_00000002"]
