"""The VisualDL scalars of a run: a view of `metrics.jsonl` in VisualDL's own file format.

`visualdl.LogWriter` is not used: it opens a new file for each start (VisualDL shows only the newest), prints, and
writes from a thread, so that a kill loses points. Here one file holds the run, and a resume writes it anew from the
records that still hold. A server that is open meanwhile goes on; restart it to be rid of points that were moved aside.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterable
from typing import Any

#: what a VisualDL server shows of each folder is the last of its files, by name, that contain "vdlrecords"
FILE_NAME = "vdlrecords.run.log"
SERIES = {
    "train": (
        "loss", "learning_rate", "grad_norm", "tokens_per_second", "tokens_per_second_per_device", "mfu", "loss_scale",
        "skipped_steps", "memory_bytes",
    ),
    "eval": ("loss", "ppl"),
    "test": ("loss", "ppl"),
}  # fmt: skip


def visualdl_command(output_dir: str) -> list[str]:
    """The command that shows the run in a browser (add `--port`).

    VisualDL 2.5.3 answers its pages with status 500 to a client whose languages hold neither English nor Chinese (or
    that sends none), whatever the versions of Flask and Werkzeug; `--language` prevents that. It opens on any one of its
    tabs, by chance; `--component_tabs` leaves only the curves.
    """
    folder = os.path.join(output_dir, "visualdl")
    return ["visualdl", "--logdir", folder, "--component_tabs", "scalar", "--language", "en"]


class VisualDLFile:
    """The open file; series are named `kind/field` (`train/loss`), and a point's step is the updates done.

    VisualDL holds values in float32 and times in milliseconds.

    Args:
        folder: made if absent.
        history: records that the file starts with.
    """

    def __init__(self, folder: str, history: Iterable[dict[str, Any]] = ()):
        from visualdl.component.base_component import meta_data

        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, FILE_NAME)
        aside = os.path.join(folder, "rebuilt.tmp")
        meta = meta_data(tag="meta_data_tag", display_name="", step=0, walltime=round(time.time() * 1000))
        with open(aside, "wb") as file:
            file.write(_frames([meta]))
            file.writelines(map(_points, history))
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115

    def write(self, record: dict[str, Any]) -> None:
        """Adds a record's points, all in one write to the operating system."""
        self._file.write(_points(record))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _points(record: dict[str, Any]) -> bytes:
    from visualdl.component.base_component import scalar

    kind, step, walltime_ms = record["kind"], record["step"], round(record["time"] * 1000)
    known = [(name, record[name]) for name in SERIES.get(kind, ()) if record.get(name) is not None]
    return _frames(scalar(tag=f"{kind}/{name}", value=value, step=step, walltime=walltime_ms) for name, value in known)


def _frames(messages: Iterable[Any]) -> bytes:
    from visualdl.writer.record_writer import RecordWriter

    buffer = io.BytesIO()
    writer = RecordWriter(buffer)
    for message in messages:
        writer.write(message.SerializeToString())
    return buffer.getvalue()
