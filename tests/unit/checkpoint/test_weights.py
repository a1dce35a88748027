"""One plain file of weights, which is a checkpoint too."""

from __future__ import annotations

import errno
import tracemalloc

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.paddle import load_file

from ppfleetx.checkpoint import stream, weights
from ppfleetx.checkpoint.fingerprint import fingerprint
from ppfleetx.checkpoint.inspect import faults
from ppfleetx.checkpoint.reader import Checkpoint
from ppfleetx.checkpoint.weights import WEIGHTS, consolidate
from ppfleetx.config.errors import UserError
from tests.unit.checkpoint.written import bfloat16, random_arrays, write_checkpoint

ARRAYS = random_arrays(
    ("a.weight", (5, 4), "float32"), ("a.weight:moment1", (5, 4), "float32"), ("b.bias", (7,), "float16")
)
ARRAYS["c.weight"] = bfloat16(random_arrays(("c", (3, 2), "float32"))["c"])


@pytest.mark.parametrize("piece_bytes", [4, 1 << 20])
def test_another_reader_finds_the_same_bits(tmp_path, monkeypatch, piece_bytes):
    monkeypatch.setattr(stream, "PIECE_BYTES", piece_bytes)
    saved = write_checkpoint(tmp_path / "cut", ARRAYS, parts=3, dim=1, run={"config": {"x": 1}}, progress={"step": 9})
    assert consolidate(saved, tmp_path / "out/of/the/way") == 3
    file = tmp_path / "out/of/the/way" / WEIGHTS
    found = load_file(str(file))
    assert sorted(found) == ["a.weight", "b.bias", "c.weight"]
    for name, tensor in found.items():
        assert tensor.numpy().dtype == ARRAYS[name].dtype or name == "c.weight"
        assert tensor.shape == list(ARRAYS[name].shape) and tensor.numpy().tobytes() == ARRAYS[name].tobytes()
    with safe_open(str(file), "numpy") as opened:
        assert opened.metadata() == {"format": "ppfleetx", "source": f"step 9 of {tmp_path / 'cut'}"}


def test_it_is_a_checkpoint_that_keeps_the_config(tmp_path):
    saved = write_checkpoint(tmp_path / "cut", ARRAYS, parts=2, run={"config": {"x": 1}}, progress={"step": 9})
    consolidate(saved, tmp_path / "out")
    assert faults(tmp_path / "out") == []
    again = Checkpoint(tmp_path / "out")
    assert again.shapes() == saved.shapes() and again.all_slots() == {""}
    assert fingerprint(again).state == fingerprint(again).weights == fingerprint(saved).weights
    assert again.manifest.progress == {} and again.manifest.run["config"] == {"x": 1}
    consolidate(again, tmp_path / "once more")
    assert (tmp_path / "once more" / WEIGHTS).stat().st_size < 2 * (tmp_path / "out" / WEIGHTS).stat().st_size
    assert fingerprint(Checkpoint(tmp_path / "once more")) == fingerprint(again)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut", "once more", "out"]


def test_one_file_alone(tmp_path):
    saved = write_checkpoint(tmp_path / "cut", ARRAYS, parts=3)
    consolidate(saved, tmp_path / "out")
    assert consolidate(saved, tmp_path / "there/alone.safetensors") == 3
    assert (tmp_path / "there/alone.safetensors").read_bytes() == (tmp_path / "out" / WEIGHTS).read_bytes()
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["alone.safetensors"]
    with pytest.raises(UserError, match="nothing is overwritten"):
        consolidate(saved, tmp_path / "there/alone.safetensors")


def test_two_at_once_do_not_touch_each_other(tmp_path):
    """Two containers on one disk, in which both processes have the same number: the first that is done has the place."""
    saved = write_checkpoint(tmp_path / "cut", ARRAYS)
    with pytest.raises(OSError, match="not empty"), weights.new_folder(tmp_path / "out") as aside:
        (aside / "mine").touch()
        consolidate(saved, tmp_path / "out")
        assert (aside / "mine").exists()
    assert faults(tmp_path / "out") == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut", "out"]


def test_nothing_is_overwritten(tmp_path):
    saved = write_checkpoint(tmp_path / "cut", ARRAYS)
    (tmp_path / "out").write_text("mine")
    with pytest.raises(UserError, match="nothing is overwritten"):
        consolidate(saved, tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    saved = write_checkpoint(tmp_path / "cut", ARRAYS)

    def full(path, *_):
        path.write_bytes(b"some")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(weights, "write_shard", full)
    with pytest.raises(OSError, match="No space left"):
        consolidate(saved, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["cut"]


def test_memory_does_not_grow_with_the_model(tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "PIECE_BYTES", 2**20)
    values = np.arange(2**23, dtype=np.float32).reshape(2**12, 2**11)
    saved = write_checkpoint(tmp_path / "large", {"a": values}, parts=2, dim=1)
    tracemalloc.start()
    try:
        consolidate(saved, tmp_path / "out")
        assert tracemalloc.get_traced_memory()[1] < 3 * 2**20
    finally:
        tracemalloc.stop()
    assert np.array_equal(Checkpoint(tmp_path / "out").read_whole("a"), values)
