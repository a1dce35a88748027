"""Saving under faults: a checkpoint is whole or not there; damage is found and named."""

from __future__ import annotations

import errno
import os
import shutil
import threading

import numpy as np
import paddle
import pytest

from ppfleetx.checkpoint import manager as manager_module
from ppfleetx.checkpoint.manager import CheckpointManager, SaveError
from ppfleetx.checkpoint.manifest import MANIFEST, missing, verify
from ppfleetx.checkpoint.reader import Checkpoint
from ppfleetx.checkpoint.writer import TrainingState
from ppfleetx.config import UserError
from ppfleetx.distributed import ParallelContext, Topology
from ppfleetx.distributed.agreement import Meetings
from ppfleetx.distributed.store import JobStore
from ppfleetx.distributed.trainable import Piece
from ppfleetx.layers.spec import ParameterSpec

#: what a save does to the disk, in the module os
CALLS = ("open", "write", "fsync", "replace", "mkdir", "unlink", "rmdir")
SHARD = "shard_00000.safetensors"


def state(value: float, rows: tuple[int, int] = (0, 6)) -> TrainingState:
    """A model of one matrix [6, 4], all of it or some rows."""
    tensor = paddle.full([rows[1] - rows[0], 4], value)
    tensor.spec = ParameterSpec(name="a.weight", shape=(6, 4))
    piece = Piece("a.weight", tensor, (rows, (0, 4)), None, True)
    return TrainingState([piece], {"a.weight.moment1": tensor * 2}, {"global_seed": 1}, {"step": 1}, {"layout": {}})


@pytest.fixture
def alone(tmp_path):
    return CheckpointManager(tmp_path, ParallelContext(Topology(0, 1), "cpu", {}, None))


class Strike:
    """Makes the `number`-th disk operation of a save raise, before it happens or after it (a write: half-way)."""

    def __init__(self, monkeypatch, number: int, after: bool, error: BaseException):
        self.count, self.number, self.after, self.error = 0, number, after, error
        for name in CALLS:
            monkeypatch.setattr(os, name, self._wrapped(name, getattr(os, name)))

    def _wrapped(self, name, call):
        def wrapped(*args, **kwargs):
            self.count += 1
            if self.count != self.number:
                return call(*args, **kwargs)
            if self.after:
                if name == "write":
                    args = (args[0], args[1][: len(args[1]) // 2])
                call(*args, **kwargs)
            raise self.error

        return wrapped


class Killed(BaseException):
    """Nothing may catch it: the process is gone."""


def operations(alone, monkeypatch) -> int:
    """How many disk operations a save makes."""
    with monkeypatch.context() as patch:
        strike = Strike(patch, -1, False, Killed())
        alone.save(9, state(9.0))
    shutil.rmtree(alone.output_dir / "step_00000009")
    return strike.count


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_killed_at_any_point_of_a_save_auto_finds_the_newest_whole_one(alone, monkeypatch, after):
    total = operations(alone, monkeypatch)
    assert total > 15
    alone.save(1, state(1.0))
    outcomes = []
    for number in range(1, total + 1):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            Strike(patch, number, after, Killed())
            alone.save(2, state(2.0))
        found = alone.find("auto")
        outcomes.append(found.name)
        expected = 1.0 if found.name == "step_00000001" else 2.0
        assert verify(found) == []
        assert np.all(Checkpoint(found).read_whole("a.weight") == expected)
        shutil.rmtree(alone.output_dir / "step_00000002", ignore_errors=True)
    assert outcomes == sorted(outcomes) and outcomes.count("step_00000002") < 5  # whole only from the rename on
    alone.save(2, state(2.0))
    assert sorted(path.name for path in alone.output_dir.iterdir()) == ["step_00000001", "step_00000002"]


def test_a_full_disk_at_any_point_is_reported_and_loses_nothing(alone, monkeypatch):
    total = operations(alone, monkeypatch)
    alone.save(1, state(1.0))
    for number in range(1, total - 4):  # the last ones come after the rename
        with monkeypatch.context() as patch, pytest.raises(SaveError, match=r"rank 0 cannot write.*No space left"):
            Strike(patch, number, True, OSError(errno.ENOSPC, "No space left on device"))
            alone.save(2, state(2.0))
        assert [path.name for path in alone.output_dir.iterdir()] == ["step_00000001"]
    assert verify(alone.find("auto")) == []


def test_what_killed_saves_left_is_removed_by_the_next(alone):
    (alone.output_dir / ".step_00000007.tmp").mkdir()
    (alone.output_dir / "step_00000008").mkdir()
    (alone.output_dir / "step_00000008/rank_00000.json").write_text("{}")
    alone.save(8, state(1.0))
    assert [path.name for path in alone.output_dir.iterdir()] == ["step_00000008"]
    assert verify(alone.output_dir / "step_00000008") == []


class TestDamage:
    """Named by `verify`; passed over by auto, refused by PATH."""

    @pytest.fixture
    def folder(self, alone):
        alone.save(1, state(1.0))
        return alone.save(2, state(2.0))

    def refused(self, alone, folder, *words):
        assert alone.find("auto").name == "step_00000001"
        with pytest.raises(UserError) as caught:
            alone.find(str(folder))
        assert all(word in str(caught.value) for word in (*words, str(folder)))

    def test_every_byte_counts(self, folder):
        for path in folder.iterdir():
            content = path.read_bytes()
            for position in range(0, len(content), 7):
                changed = bytearray(content)
                changed[position] ^= 1
                path.write_bytes(changed)
                faults = verify(folder)
                assert len(faults) == 1 and faults[0].startswith(path.name), (path, position)
            path.write_bytes(content)
        assert verify(folder) == []

    def test_a_flipped_bit(self, alone, folder):
        content = bytearray((folder / SHARD).read_bytes())
        content[-3] ^= 0x10
        (folder / SHARD).write_bytes(content)
        assert missing(folder) is None
        self.refused(alone, folder, SHARD, "checksum")

    def test_truncated(self, alone, folder):
        os.truncate(folder / SHARD, 100)
        assert f"{SHARD} has 100 bytes instead of" in (missing(folder) or "")
        self.refused(alone, folder, SHARD, "has 100 bytes")

    @pytest.mark.parametrize("name", [SHARD, "rank_00000.json", MANIFEST])
    def test_a_file_is_missing(self, alone, folder, name):
        (folder / name).unlink()
        assert any(name in fault for fault in verify(folder))
        self.refused(alone, folder, f"{name} is missing")

    def test_all_faults_are_named(self, folder):
        (folder / "rank_00000.json").unlink()
        os.truncate(folder / SHARD, 100)
        assert [fault.split()[0] for fault in verify(folder)] == [SHARD, "rank_00000.json"]

    def test_a_format_of_another_time(self, alone, folder):
        text = (folder / MANIFEST).read_text().replace('"ppfleetx-', '"ppfleetx-9')
        (folder / MANIFEST).write_text(text)
        self.refused(alone, folder, "ppfleetx-9", "this version reads")


class _Transport:
    """The job's store for threads of one process."""

    def __init__(self):
        self._values, self._lock = {}, threading.Lock()

    def set(self, key, text):
        self._values[key] = text.encode()

    def get(self, key):
        return self._values[key]

    def add(self, key, increment):
        with self._lock:
            self._values[key] = self._values.get(key, 0) + increment
            return self._values[key]


def on_two_ranks(tmp_path, work):
    """`work(manager, rank)` as two ranks, in threads; their results, or the errors they raised."""
    transport, results = _Transport(), [None, None]

    def run(rank):
        meetings = Meetings(JobStore(transport, rank, 2))
        context = ParallelContext(Topology(rank, 2), "cpu", {}, meetings)
        try:
            results[rank] = work(CheckpointManager(tmp_path, context), rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


def half(rank: int) -> TrainingState:
    return state(rank + 1.0, (0, 3) if rank == 0 else (3, 6))


def test_two_ranks_write_one_checkpoint(tmp_path):
    final = tmp_path / "step_00000001"
    assert on_two_ranks(tmp_path, lambda manager, rank: manager.save(1, half(rank))) == [final, final]
    assert np.array_equal(Checkpoint(final).read_whole("a.weight")[:, 0], [1, 1, 1, 2, 2, 2])
    assert np.array_equal(Checkpoint(final).read_whole("a.weight", "moment1")[:, 0], [2, 2, 2, 4, 4, 4])
    assert on_two_ranks(tmp_path, lambda manager, _: manager.find("auto")) == [final, final]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_cannot_write_lets_nobody_wait(tmp_path, monkeypatch, failing):
    write_own = manager_module.write_own

    def strike(folder, rank, held):
        if rank == failing and held.progress["step"] == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_own(folder, rank, held)

    monkeypatch.setattr(manager_module, "write_own", strike)

    def work(manager, rank):
        manager.save(1, half(rank))
        held = half(rank)
        held.progress["step"] = 2
        return manager.save(2, held)

    errors = on_two_ranks(tmp_path, work)
    assert all(isinstance(error, SaveError) and f"rank {failing} cannot write" in str(error) for error in errors)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    assert verify(tmp_path / "step_00000001") == []


def test_damage_that_one_rank_reads_is_passed_over_by_all(tmp_path):
    on_two_ranks(tmp_path, lambda manager, rank: [manager.save(step, half(rank)) for step in (1, 2)])
    path = tmp_path / "step_00000002/shard_00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    found = on_two_ranks(tmp_path, lambda manager, _: manager.find("auto"))
    assert found == [tmp_path / "step_00000001"] * 2
    errors = on_two_ranks(tmp_path, lambda manager, _: manager.find(str(path.parent)))
    assert all(isinstance(error, UserError) and "shard_00001.safetensors was changed" in str(error) for error in errors)
