"""What `ls`, `verify` and `show` tell."""

from __future__ import annotations

import re

import numpy as np
import pytest

from ppfleetx.checkpoint import stream
from ppfleetx.checkpoint.inspect import checkpoints_in, faults, layout_name, listing, overview, readable, statistics
from ppfleetx.checkpoint.manifest import MANIFEST
from ppfleetx.checkpoint.reader import Checkpoint
from ppfleetx.checkpoint.shards import Damaged, Shard
from ppfleetx.config.errors import UserError
from tests.unit.checkpoint.written import bfloat16, random_arrays, write_checkpoint

ARRAYS = random_arrays(("a.weight", (5, 4), "float32"), ("a.weight:moment1", (5, 4), "float32"))


def test_listing_says_which_are_whole_and_why_others_are_not(tmp_path):
    layout = {"layout": {"dp": 1, "pp": 2, "mp": 2}, "config": {"Model": {"sequence_parallel": True}}}
    write_checkpoint(tmp_path / "step_00000002", ARRAYS, run=layout, progress={"step": 2})
    write_checkpoint(tmp_path / "step_00000010", ARRAYS, parts=2, progress={"step": 10})
    (tmp_path / "step_00000010/shard_00001.safetensors").unlink()
    (tmp_path / "step_00000011").mkdir()
    (tmp_path / ".step_00000012.tmp").mkdir()
    write_checkpoint(tmp_path / ".step_00000001.deleted", ARRAYS)
    (tmp_path / "previous-1").mkdir()
    (tmp_path / "metrics.jsonl").touch()
    rows = listing(tmp_path)
    deleted = rows.pop(0)
    assert deleted.name == ".step_00000001.deleted" and deleted.state.startswith("unfinished: being written or deleted")
    assert [(row.name, row.step, row.layout) for row in rows] == [
        ("step_00000002", "2", "pp2mp2sp"),
        ("step_00000010", "10", "one process"),
        ("step_00000011", "-", "-"),
        (".step_00000012.tmp", "-", "-"),
    ]
    assert [row.state.partition(":")[0] for row in rows] == ["complete", "damaged", "incomplete", "unfinished"]
    assert "shard_00001.safetensors is missing" in rows[1].state and MANIFEST in rows[2].state
    size = sum(file.stat().st_size for file in (tmp_path / "step_00000002").iterdir())
    assert rows[0].size_bytes == size > 5 * 4 * 4 * 2
    assert listing(tmp_path / "step_00000002") == rows[:1]
    assert [path.name for path in checkpoints_in(tmp_path)] == [row.name for row in rows[:3]]


def test_only_a_number_after_step_makes_a_folder_a_step(tmp_path):
    """An output_dir may be called step_decay; it, and what lies in it beside the steps, is no broken checkpoint."""
    folder = tmp_path / "step_decay"
    write_checkpoint(folder / "step_00000002", ARRAYS)
    write_checkpoint(folder / ".step_00000003.tmp", ARRAYS)
    (folder / "step_notes").mkdir()
    (folder / "step_00000009").touch()
    assert [path.name for path in checkpoints_in(folder)] == ["step_00000002"]
    assert [row.name for row in listing(folder)] == ["step_00000002", ".step_00000003.tmp"]


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir(), lambda path: path.touch()])
def test_a_folder_without_any_is_a_users_mistake(tmp_path, make):
    make(tmp_path / "x")
    with pytest.raises(UserError, match="/x"):
        checkpoints_in(tmp_path / "x")


@pytest.mark.parametrize(
    ("degrees", "stage", "name"),
    [
        ({"dp": 2, "pp": 1, "sharding": 1, "mp": 2, "sep": 1}, 2, "dp2mp2"),
        ({"dp": 1, "sharding": 2}, 3, "sharding2s3"),
        ({"dp": 1, "sharding": 1}, 2, "one process"),
    ],
)
def test_layout_name(degrees, stage, name):
    config = {"Distributed": {"sharding": {"sharding_stage": stage}}, "Model": {"sequence_parallel": False}}
    assert layout_name(config, degrees) == name


def test_every_fault_is_named(tmp_path):
    folder = tmp_path / "step_1"
    write_checkpoint(folder, ARRAYS, parts=4)
    assert faults(folder) == []
    (folder / "shard_00000.safetensors").unlink()
    with open(folder / "shard_00001.safetensors", "r+b") as file:
        file.truncate(100)
    with open(folder / "shard_00002.safetensors", "r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([last ^ 1]))
    found = faults(folder)
    assert len(found) == 3
    for fault, words in zip(found, ("00000.safetensors is missing", "100 bytes instead", "was changed"), strict=True):
        assert words in fault
    (folder / MANIFEST).write_text(
        (folder / MANIFEST).read_text().replace("BF16", "F16").replace('"step": 3', '"step": 4')
    )
    assert faults(folder) == [f"{MANIFEST} cannot be read: its checksum is wrong"]


@pytest.mark.parametrize("piece_bytes", [12, 1 << 20])
def test_statistics_are_those_of_numpy(tmp_path, monkeypatch, piece_bytes):
    monkeypatch.setattr(stream, "PIECE_BYTES", piece_bytes)
    values = random_arrays(("a", (7, 9), "float32"), seed=3)["a"]
    values[2, 3], values[0, 0] = np.nan, 0
    values[4, :2] = np.inf
    finite = values[np.isfinite(values)].astype("float64")
    lines = "\n".join(statistics(write_checkpoint(tmp_path / "a", {"a": values}, parts=3), "a"))
    expected = [finite.min(), finite.max(), finite.mean(), finite.std(), np.linalg.norm(finite)]
    found = re.findall(r"(?:least|most|mean|deviation|norm) (-?[\d.]+)", lines)
    assert [float(number) for number in found] == pytest.approx(expected, rel=1e-8)
    assert "F32 [7, 9], stored in 3 parts" in lines
    assert "not a number: 1" in lines and "infinite: 2" in lines and "zero: 1" in lines


def test_bfloat16_is_read_as_such(tmp_path):
    saved = write_checkpoint(tmp_path / "a", {"a": bfloat16(np.array([1.0, -2.5, 0.5]))})
    assert "  least -2.5, most 1" in statistics(saved, "a")


def test_a_wrong_name_gets_the_nearest(tmp_path):
    with pytest.raises(UserError, match=r"did you mean a.weight"):
        statistics(write_checkpoint(tmp_path / "a", ARRAYS), "a.wieght")
    with pytest.raises(UserError, match="lists the tensors"):
        statistics(Checkpoint(tmp_path / "a"), "zzz")


def test_overview_has_every_tensor_with_its_slots(tmp_path):
    lines = overview(
        write_checkpoint(tmp_path / "a", ARRAYS, progress={"step": 7, "consumed_samples": 56, "scaler": {}})
    )
    assert "  step             7" in lines and "  consumed_samples 56" in lines
    assert lines[-1].split("  ")[0] == "a.weight" and lines[-1].endswith("[5, 4]  F32    moment1 F32")
    assert any("20 in 1 tensors" in line for line in lines)


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1_234_567, "1.2 MB"), (5_000_000_000, "5.0 GB")]
)
def test_sizes(size, text):
    assert readable(size) == text


@pytest.mark.parametrize("content", [b"", b"x" * 7, (10).to_bytes(8, "little") + b"[1, 2]    ", b"\xff" * 64])
def test_what_is_no_safetensors_file_is_said_to_be_none(tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(Damaged, match="/x"):
        Shard(tmp_path / "x").tensors()
