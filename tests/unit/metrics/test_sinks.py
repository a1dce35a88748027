"""The log of a run: JSON lines, VisualDL series, resume (case C91)."""

import json
import logging
import os
import sys

import numpy as np
import pytest

from ppfleetx.metrics import EvalRecord, MetricsWriter, TrainRecord
from ppfleetx.metrics.visualdl_file import FILE_NAME

SERIES = {"loss": "train/loss", "learning_rate": "train/learning_rate", "grad_norm": "train/grad_norm",
          "tokens_per_second": "train/tokens_per_second"}  # fmt: skip


def record(step, loss=None, **changes):
    values = {
        "step": step, "epoch": 0, "updates": 1, "loss": 1 / 3 + step if loss is None else loss, "learning_rate": 1e-3 / step,
        "grad_norm": 0.1 * step, "found_inf": 0, "avg_batch_cost_s": 0.1, "tokens_per_second": 100.0 + step,
        "tokens_per_second_per_device": 50.0, "mfu": None, "memory_bytes": 1000,
    }  # fmt: skip
    return TrainRecord(**{**values, **changes})


def write(folder, steps, **options):
    with MetricsWriter(str(folder), **options) as writer:
        for step in steps:
            writer.write(record(step))


def json_lines(folder, name="metrics.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def visualdl_points(folder):
    """{tag: [(step, value)]}, read back with VisualDL's own reader."""
    from visualdl import LogReader

    reader = LogReader(file_path=str(folder / "visualdl" / FILE_NAME))
    return {
        tag.replace("%", "/"): [(one.id, one.value) for one in reader.get_data("scalar", tag)]
        for tag in reader.get_tags()["scalar"]
    }


def assert_series(folder, steps):
    """Both logs hold the same points, each step once."""
    lines = json_lines(folder)
    assert [line["step"] for line in lines] == list(steps)
    points = visualdl_points(folder)
    for field, tag in SERIES.items():
        assert points[tag] == [(line["step"], float(np.float32(line[field]))) for line in lines]


def test_fields_and_full_precision(tmp_path):
    with MetricsWriter(str(tmp_path), wall_clock=lambda: 1234.5) as writer:
        writer.write(record(1, loss=0.1 + 0.2))
        assert json_lines(tmp_path) == [{  # already there: a line at a time
            "kind": "train", "step": 1, "time": 1234.5, "epoch": 0, "updates": 1,
            "loss": 0.30000000000000004, "learning_rate": 1e-3, "grad_norm": 0.1,
            "loss_scale": 1.0, "found_inf": 0, "skipped_steps": 0, "avg_batch_cost_s": 0.1,
            "tokens_per_second": 101.0, "tokens_per_second_per_device": 50.0, "mfu": None, "memory_bytes": 1000,
        }]  # fmt: skip
        writer.write(EvalRecord(step=1, loss=2.0, batches=3, avg_batch_cost_s=0.5))
    assert json_lines(tmp_path)[1] == {
        "kind": "eval", "step": 1, "time": 1234.5, "loss": 2.0, "ppl": 7.38905609893065, "batches": 3,
        "avg_batch_cost_s": 0.5,
    }  # fmt: skip
    points = visualdl_points(tmp_path)
    assert points["eval/loss"] == [(1, 2.0)] and points["eval/ppl"] == [(1, float(np.float32(7.38905609893065)))]
    assert points["train/memory_bytes"] == [(1, 1000.0)] and "train/mfu" not in points


def test_numbers_that_are_not_finite_are_null(tmp_path):
    with MetricsWriter(str(tmp_path)) as writer:
        writer.write(record(1, grad_norm=float("inf"), loss=float("nan")))
    line = (tmp_path / "metrics.jsonl").read_text()
    assert '"loss": null' in line and '"grad_norm": null' in line
    assert "train/loss" not in visualdl_points(tmp_path)


def test_c91_resume_after_a_clean_end(tmp_path):
    write(tmp_path, range(1, 7))
    write(tmp_path, range(7, 9), resume_step=6)
    assert_series(tmp_path, range(1, 9))
    assert sorted(os.listdir(tmp_path)) == ["metrics.jsonl", "visualdl"]
    assert os.listdir(tmp_path / "visualdl") == [FILE_NAME]


def test_c91_resume_after_a_crash_that_had_logged_more(tmp_path):
    with MetricsWriter(str(tmp_path)) as writer:
        for step in range(1, 9):
            writer.write(record(step, loss=99.0 if step > 6 else None))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "step": 9, "lo')  # cut by the kill
    write(tmp_path, range(7, 9), resume_step=6)
    assert_series(tmp_path, range(1, 9))
    assert [line["loss"] for line in json_lines(tmp_path)] == [1 / 3 + step for step in range(1, 9)]
    assert [line["loss"] for line in json_lines(tmp_path, "metrics.jsonl.old-1")] == [99.0, 99.0]  # nothing is lost


def test_resume_with_only_a_cut_line_or_no_log(tmp_path):
    write(tmp_path, range(1, 3))
    text = (tmp_path / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(text.rstrip("\n"))  # the newline alone is missing
    write(tmp_path, [3], resume_step=2)
    assert_series(tmp_path, range(1, 4))
    write(tmp_path / "elsewhere", [3], resume_step=2)
    assert_series(tmp_path / "elsewhere", [3])


@pytest.mark.parametrize("resume_step", [None, 0])
def test_a_fresh_start_moves_the_old_log_aside(tmp_path, resume_step, caplog):
    (tmp_path / "metrics.jsonl.old-1").write_text("older\n")
    write(tmp_path, range(1, 4))
    with caplog.at_level(logging.INFO, logger="ppfleetx"):
        write(tmp_path, range(1, 3), resume_step=resume_step)
    assert_series(tmp_path, range(1, 3))
    assert len(json_lines(tmp_path, "metrics.jsonl.old-2")) == 3
    assert (tmp_path / "metrics.jsonl.old-1").read_text() == "older\n"
    assert os.path.exists(tmp_path / "visualdl.old-1")
    assert "metrics.jsonl.old-2" in caplog.text


def test_a_server_that_is_open_during_a_resume_shows_each_step_once(tmp_path):
    from visualdl.reader.reader import LogReader

    write(tmp_path, range(1, 7))
    reader = LogReader(logdir=str(tmp_path / "visualdl"))
    write(tmp_path, range(7, 9), resume_step=6)
    reader.load_new_data(update=True)
    items = reader.data_manager.get_reservoir("scalar").get_items(str(tmp_path / "visualdl"), "train%loss")
    assert [item.id for item in items] == list(range(1, 9))


@pytest.mark.parametrize("when", ["import", "write"])
def test_a_broken_visualdl_is_switched_off_with_one_warning(tmp_path, monkeypatch, caplog, when):
    if when == "import":
        monkeypatch.setitem(sys.modules, "visualdl.component.base_component", None)
    with caplog.at_level(logging.WARNING, logger="ppfleetx"), MetricsWriter(str(tmp_path)) as writer:
        if when == "write":
            writer._visualdl.close()
        for step in range(1, 4):
            writer.write(record(step))
    assert len(json_lines(tmp_path)) == 3
    assert len(caplog.records) == 1 and "VisualDL" in caplog.text


def test_visualdl_off(tmp_path):
    write(tmp_path, [1], visualdl=False)
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_console_line(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="ppfleetx"):
        write(tmp_path, [10])
    assert caplog.messages == [record(10).line()]


class _FullDisk:
    """A file that takes so many more bytes, like a disk: a write may be short, the next one fails."""

    def __init__(self, file):
        self._file, self.room, self.name = file, 10**9, file.name

    def write(self, data):
        if self.room == 0:
            raise OSError(28, "No space left on device")
        count = self._file.write(data[: self.room])
        self.room -= count
        return count

    def __getattr__(self, name):
        return getattr(self._file, name)


def test_records_wait_for_a_disk_that_is_full(tmp_path, caplog):
    """Said once; every line is whole, in order, once; what never fits is counted at the end."""
    with MetricsWriter(str(tmp_path), visualdl=False) as writer:
        disk = writer._jsonl._file = _FullDisk(writer._jsonl._file)
        writer.write(record(1))
        disk.room = 40  # less than a line
        writer.write(record(2))
        writer.write(record(3))
        assert [line["step"] for line in json_lines(tmp_path)] == [1]
        disk.room = 10**9
        writer.write(record(4))
        assert [line["step"] for line in json_lines(tmp_path)] == [1, 2, 3, 4]
        disk.room = 0
        writer.write(record(5))
    assert [line["step"] for line in json_lines(tmp_path)] == [1, 2, 3, 4]
    assert caplog.text.count("its records wait in memory") == 2
    assert "1 records are not in" in caplog.text and "No space left" in caplog.text
