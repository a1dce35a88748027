"""What a manifest may say. Its checksum is right for whoever computes it, so every member is looked at as well."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from ppfleetx.checkpoint.inspect import faults, listing
from ppfleetx.checkpoint.manifest import FORMAT, MANIFEST, Entry, _checksum, missing, uncovered
from ppfleetx.checkpoint.reader import Checkpoint
from ppfleetx.checkpoint.shards import Damaged
from ppfleetx.layers.spec import ParameterSpec
from tests.unit.checkpoint.written import write_checkpoint


@pytest.fixture
def forged(tmp_path):
    """A checkpoint beside a whole one; the returned function writes its manifest anew, with a right checksum."""
    arrays = {"a.weight": np.arange(6, dtype="float32").reshape(2, 3), "b.bias": np.ones(3, "float32")}
    write_checkpoint(tmp_path / "step_1", arrays, parts=2)
    shutil.copytree(tmp_path / "step_1", tmp_path / "step_2")
    value = json.loads((tmp_path / "step_2" / MANIFEST).read_text())
    body = {name: value[name] for name in ("progress", "run", "files", "entries")}

    def write(change):
        change(body)
        text = json.dumps({"format": FORMAT, "crc32c": _checksum(body), **body})
        (tmp_path / "step_2" / MANIFEST).write_text(text)
        return tmp_path / "step_2"

    return write


def assert_refused(path, *told):
    (fault,) = faults(path)
    assert fault == missing(path)
    for words in told:
        assert words in fault, fault
    with pytest.raises(Damaged, match=MANIFEST):
        Checkpoint(path)
    assert [row.name for row in listing(path.parent)] == ["step_1", "step_2"]  # it does not hide the others


def test_what_is_written_is_read(forged):
    path = forged(lambda body: None)
    assert faults(path) == []
    assert np.array_equal(Checkpoint(path).read_whole("a.weight"), np.arange(6).reshape(2, 3))


@pytest.mark.parametrize("name", ["../step_1/shard_00000.safetensors", "/etc/passwd", "..", "a/b", ""])
def test_nothing_outside_the_folder_is_named(forged, name):
    path = forged(lambda body: body["files"].update({name: {"size": 3, "crc32c": "00000000"}}))
    assert_refused(path, f"a file of another folder, {name!r}")


def test_a_shard_must_be_among_the_files(forged):
    path = forged(lambda body: body["entries"][0].update(file="../step_1/shard_00000.safetensors"))
    assert_refused(path, "no size and checksum of ../step_1/shard_00000.safetensors")


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "F33"}, {"name": 3}, {"slot": None}, {"shape": [2]}, {"shape": [1.5, 3]}, {"shape": None}, {"box": [[0, 1]]},
        {"box": [[-1, 1], [0, 3]]}, {"box": [[1, 3], [0, 3]]}, {"box": [[1, 0], [0, 3]]}, {"box": [["a", "b"], [0, 3]]},
        {"flat": [0, 9]}, {"flat": [2, 1]}, {"flat": [0]}, {"more": 1},
    ],
)  # fmt: skip
def test_an_entry_that_no_tensor_can_have(forged, change):
    assert_refused(forged(lambda body: body["entries"][0].update(change)), "Error")


@pytest.mark.parametrize(
    "change",
    [
        {"progress": [1]}, {"progress": None}, {"run": []}, {"run": None}, {"run": {"config": [1]}}, {"entries": None},
        {"run": {"config": {"Model": "GPT"}}}, {"run": {"layout": [2]}}, {"run": {"layout": {"mp": "2"}}}, {"entries": [3]},
        {"run": {"versions": "1"}}, {"files": {}}, {"files": []},
        {"files": {"shard_00000.safetensors": {"size": "3", "crc32c": "00000000"}}},
    ],
)  # fmt: skip
def test_members_of_another_form(forged, change):
    assert_refused(forged(lambda body: body.update(change)), "Error")


def test_an_entry_that_stands_twice_covers_its_part_once(forged):
    """Two copies of the first row have as many elements as both rows."""

    def change(body):
        first, second = (entry for entry in body["entries"] if entry["name"] == "a.weight")
        second.update(first)

    assert faults(forged(change)) == ["a.weight of shape [2, 3] has 3 elements in the files"]


def test_entries_that_overlap_leave_a_gap(forged):
    """Elements 0 and 1 of three, then 1 again: three elements in all."""

    def change(body):
        first, second = (entry for entry in body["entries"] if entry["name"] == "b.bias")
        first.update(box=[[0, 2]], flat=None)
        second.update(box=[[1, 3]], flat=[0, 1])

    fault = "b.bias has elements that are twice in the files, so others are missing"
    assert faults(path := forged(change)) == [fault] and missing(path) == fault


def test_runs_of_one_box_that_overlap():
    def parts(*runs):
        return [Entry("a", "", (6, 4), "F32", ((0, 6), (0, 4)), run, "shard_00000.safetensors") for run in runs]

    assert uncovered(parts((0, 10), (10, 24))) is None
    assert "twice in the files" in (uncovered(parts((0, 10), (8, 22))) or "")


def test_a_tensor_with_a_gap_is_no_complete_checkpoint(forged):
    assert (
        missing(forged(lambda body: body["entries"].pop(0))) == "a.weight of shape [2, 3] has 3 elements in the files"
    )


def test_a_newer_format_says_which(forged):
    path = forged(lambda body: None)
    (path / MANIFEST).write_text((path / MANIFEST).read_text().replace(FORMAT, "ppfleetx-3"))
    assert_refused(path, "its format is ppfleetx-3", f"this version reads {FORMAT}")


def test_a_slot_of_another_shape_than_its_parameter(tmp_path):
    arrays = {"a.weight": np.ones((6, 4), "float32"), "a.weight:moment1": np.ones(24, "float32")}
    saved = write_checkpoint(tmp_path / "step_3", arrays)
    spec = ParameterSpec(name="a.weight", shape=(6, 4))
    with pytest.raises(Damaged, match=r"a.weight moment1 has shape \[24\], not \[6, 4\]"):
        saved.read_piece(spec, spec.box(), None, "moment1")


def test_a_tensor_of_two_types_is_none(forged):
    fault = "b.bias of shape [3] has 1 elements in the files"
    assert faults(forged(lambda body: body["entries"][1].update(dtype="F16"))) == [fault]


@pytest.mark.parametrize("text", ["", "[]", "3", "{", "[" * 100_000, '{"a":' * 100_000])
def test_no_manifest_at_all(forged, text):
    path = forged(lambda body: None)
    (path / MANIFEST).write_text(text)
    assert_refused(path, "manifest.json cannot be read")
