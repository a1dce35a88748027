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
from ppfleetx.checkpoint.manager import CheckpointManager
from ppfleetx.checkpoint.manifest import MANIFEST, missing, verify
from ppfleetx.checkpoint.reader import Checkpoint
from ppfleetx.checkpoint.retention import Retention
from ppfleetx.checkpoint.snapshot import TrainingState
from ppfleetx.config import UserError
from ppfleetx.distributed import ParallelContext, Topology
from ppfleetx.distributed.agreement import Meetings
from ppfleetx.distributed.store import JobStore
from ppfleetx.distributed.trainable import Piece
from ppfleetx.layers.spec import ParameterSpec
from tests.disk import Strike

SHARD = "shard_00000.safetensors"


def state(value: float, rows: tuple[int, int] = (0, 6)) -> TrainingState:
    """A model of one matrix [6, 4], all of it or some rows."""
    tensor = paddle.full([rows[1] - rows[0], 4], value)
    tensor.spec = ParameterSpec(name="a.weight", shape=(6, 4))
    piece = Piece("a.weight", tensor, (rows, (0, 4)), None, True)
    return TrainingState([piece], {"a.weight.moment1": tensor * 2}, {"global_seed": 1}, {"step": 1}, {"layout": {}})


def save(manager, step, held):
    """Saves and waits; the folder if it is there then."""
    manager.save(step, held)
    assert manager.wait()
    path = manager.output_dir / f"step_{step:08d}"
    return path if path.is_dir() else None


def found(manager, ckpt_dir):
    """The checkpoint that would be restored."""
    return manager.restore(ckpt_dir, lambda path: lambda: None)


@pytest.fixture
def alone(tmp_path):
    return CheckpointManager(tmp_path, ParallelContext(Topology(0, 1), "cpu", {}, None))


def test_a_full_disk_at_any_point_is_reported_and_loses_nothing(alone, monkeypatch, caplog):
    """The run goes on: a later save works."""
    with monkeypatch.context() as patch:
        counting = Strike(patch)
        save(alone, 9, state(9.0))
    shutil.rmtree(alone.output_dir / "step_00000009")
    save(alone, 1, state(1.0))
    numbers = range(1, counting.count - 1)  # the last one syncs the parent folder, after the rename
    assert len(numbers) > 15
    for number in numbers:
        with monkeypatch.context() as patch:
            Strike(patch, number, True, OSError(errno.ENOSPC, "No space left on device"))
            assert save(alone, 2, state(2.0)) is None or number == numbers[-1]
        assert alone.failed == [2]
        alone.failed.clear()
        shutil.rmtree(alone.output_dir / "step_00000002", ignore_errors=True)
        assert [path.name for path in alone.output_dir.iterdir()] == ["step_00000001"]
    assert "step 2 was NOT saved: rank 0 cannot write a checkpoint: [Errno 28] No space left" in caplog.text
    assert verify(found(alone, "auto")) == []
    assert save(alone, 2, state(2.0)) and not alone.failed


def test_a_save_writes_what_stood_when_it_began(alone, monkeypatch):
    """Training goes on meanwhile and changes the tensors; a second save waits for the first."""
    written, go_on = manager_module.write_own, threading.Event()

    def slowly(*arguments):
        assert go_on.wait(20)
        written(*arguments)

    monkeypatch.setattr(manager_module, "write_own", slowly)
    held = state(1.0)
    alone.save(1, held)
    held.pieces[0].tensor.fill_(5.0)
    held.optimizer["a.weight.moment1"].fill_(6.0)
    assert not alone.wait(0.05) and not (alone.output_dir / "step_00000001").exists()
    threading.Timer(0.2, go_on.set).start()
    alone.save(2, held)
    first = Checkpoint(alone.output_dir / "step_00000001")
    assert np.all(first.read_whole("a.weight") == 1) and np.all(first.read_whole("a.weight", "moment1") == 2)
    assert alone.wait() and np.all(Checkpoint(alone.output_dir / "step_00000002").read_whole("a.weight") == 5)


class TestRetention:
    def steps(self, manager):
        return [int(path.name[5:]) for path in manager.steps()]

    @pytest.mark.parametrize(("keep", "left"), [
        ({}, [1, 2, 3, 4, 5, 6]),
        ({"keep_last": 2}, [5, 6]),
        ({"keep_last": 1, "keep_every": 3}, [3, 6]),
        ({"keep_last": 2, "keep_every": 2}, [2, 4, 5, 6]),
        ({"keep_last": 9}, [1, 2, 3, 4, 5, 6]),
    ])  # fmt: skip
    def test_c75_what_stays(self, alone, keep, left):
        manager = CheckpointManager(alone.output_dir, alone.context, Retention(**keep))
        for step in range(1, 7):
            save(manager, step, state(float(step)))
        assert self.steps(manager) == left
        assert all(verify(path) == [] for path in manager.steps())

    def test_c75_nothing_goes_before_the_new_one_is_complete(self, alone, monkeypatch):
        manager = CheckpointManager(alone.output_dir, alone.context, Retention(keep_last=1))
        save(manager, 1, state(1.0))
        with monkeypatch.context() as patch:
            patch.setattr(manager_module, "write_manifest", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
            save(manager, 2, state(2.0))
        assert self.steps(manager) == [1] and manager.failed == [2]
        deleted = []
        monkeypatch.setattr(manager_module, "delete", lambda path: deleted.append((path.name, self.steps(manager))))
        save(manager, 3, state(3.0))
        assert deleted == [("step_00000001", [1, 3])]

    def test_an_incomplete_one_neither_counts_nor_goes(self, alone):
        manager = CheckpointManager(alone.output_dir, alone.context, Retention(keep_last=2))
        for step in (1, 2, 3):
            save(manager, step, state(1.0))
        (alone.output_dir / "step_00000003" / MANIFEST).unlink()
        save(manager, 4, state(1.0))
        assert self.steps(manager) == [2, 3, 4]

    def test_one_that_cannot_be_deleted_is_said(self, alone, monkeypatch, caplog):
        manager = CheckpointManager(alone.output_dir, alone.context, Retention(keep_last=1))
        save(manager, 1, state(1.0))
        monkeypatch.setattr(manager_module, "delete", lambda path: (_ for _ in ()).throw(PermissionError(13, "denied")))
        save(manager, 2, state(2.0))
        assert "step_00000001 is no longer needed but cannot be deleted" in caplog.text and not manager.failed


def test_what_killed_saves_left_is_removed_by_the_next(alone):
    (alone.output_dir / ".step_00000007.tmp").mkdir()
    (alone.output_dir / ".step_00000006.deleted").mkdir()
    (alone.output_dir / "step_00000008").mkdir()
    (alone.output_dir / "step_00000008/rank_00000.json").write_text("{}")
    save(alone, 8, state(1.0))
    assert [path.name for path in alone.output_dir.iterdir()] == ["step_00000008"]
    assert verify(alone.output_dir / "step_00000008") == []


class TestDamage:
    """Named by `verify`; passed over by auto, refused by PATH."""

    @pytest.fixture
    def folder(self, alone):
        save(alone, 1, state(1.0))
        return save(alone, 2, state(2.0))

    def refused(self, alone, folder, *words):
        assert found(alone, "auto").name == "step_00000001"
        with pytest.raises(UserError) as caught:
            found(alone, str(folder))
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


def test_damage_is_found_before_the_run_is_changed(alone, tmp_path):
    """`read` may have been done, what it returned is not."""
    save(alone, 1, state(1.0))
    path = save(alone, 2, state(2.0))
    (path / SHARD).write_bytes((path / SHARD).read_bytes()[:-1] + b"\xff")
    calls = []

    def read(folder):
        calls.append(("read", folder.name))
        return lambda: calls.append(("put", folder.name))

    assert alone.restore("auto", read).name == "step_00000001"
    assert calls == [("read", "step_00000002"), ("read", "step_00000001"), ("put", "step_00000001")]


class _Store(JobStore):
    """The job's store for threads of one process."""

    def another(self):
        return self


class _Transport:
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
        context = ParallelContext(Topology(rank, 2), "cpu", {}, Meetings(_Store(transport, rank, 2)))
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
    assert on_two_ranks(tmp_path, lambda manager, rank: save(manager, 1, half(rank))) == [final, final]
    assert np.array_equal(Checkpoint(final).read_whole("a.weight")[:, 0], [1, 1, 1, 2, 2, 2])
    assert np.array_equal(Checkpoint(final).read_whole("a.weight", "moment1")[:, 0], [2, 2, 2, 4, 4, 4])
    assert on_two_ranks(tmp_path, lambda manager, _: found(manager, "auto")) == [final, final]


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), ValueError("a bug")])
def test_a_rank_that_cannot_write_lets_nobody_wait(tmp_path, monkeypatch, caplog, failing, error):
    write_own = manager_module.write_own

    def strike(folder, rank, snapshot):
        if rank == failing and snapshot.progress["step"] == 2:
            raise error
        write_own(folder, rank, snapshot)

    monkeypatch.setattr(manager_module, "write_own", strike)

    def work(manager, rank):
        save(manager, 1, half(rank))
        held = half(rank)
        held.progress["step"] = 2
        save(manager, 2, held)
        return manager.failed

    assert on_two_ranks(tmp_path, work) == [[2], [2]]
    assert caplog.text.count(f"rank {failing} cannot write a checkpoint") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    assert verify(tmp_path / "step_00000001") == []


def test_damage_that_one_rank_reads_is_passed_over_by_all(tmp_path):
    on_two_ranks(tmp_path, lambda manager, rank: [save(manager, step, half(rank)) for step in (1, 2)])
    path = tmp_path / "step_00000002/shard_00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    assert on_two_ranks(tmp_path, lambda manager, _: found(manager, "auto")) == [tmp_path / "step_00000001"] * 2
    errors = on_two_ranks(tmp_path, lambda manager, _: found(manager, str(path.parent)))
    assert all(isinstance(error, UserError) and "shard_00001.safetensors was changed" in str(error) for error in errors)
