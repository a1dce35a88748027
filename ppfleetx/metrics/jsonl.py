"""`metrics.jsonl`: one JSON object a logged line, in full precision; the one source of truth about a run's past.

A number that is not finite is written as null. Superseded records are moved to `metrics.jsonl.old-<n>`, not destroyed.
"""

from __future__ import annotations

import json
import logging
import math
import os
from typing import Any

logger = logging.getLogger("ppfleetx")

FILE_NAME = "metrics.jsonl"


class MetricsFile:
    """The open file; every record is handed to the operating system before `write` returns.

    Where that fails (the disk is full), training goes on: the records wait in memory, which is said once, and are tried again
    with the next one and at the end.

    Args:
        output_dir: folder of the run; it must exist.
        resume_step: updates done at the start. Records of later updates, which a run that crashed had logged already,
            are moved aside, and a last line that a kill cut short is dropped. None or 0: a fresh start, the whole
            file (of an earlier run) is moved aside.

    Attributes:
        kept: the records that were in the file already and still hold.
    """

    def __init__(self, output_dir: str, resume_step: int | None):
        path = os.path.join(output_dir, FILE_NAME)
        self.kept: list[dict[str, Any]] = []
        if os.path.exists(path):
            self.kept, later = _read(path, resume_step or 0)
            if not resume_step:
                _say_moved(path, move_aside(path))
            else:
                self._rewrite(path, later)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115
        self._waiting = b""

    def _rewrite(self, path: str, later: list[dict[str, Any]]) -> None:
        if later:
            aside = free_name(path)
            _replace(aside, later)
            logger.info("%d records after the checkpoint's update moved from %s to %s", len(later), path, aside)
        _replace(path, self.kept)

    def write(self, record: dict[str, Any]) -> None:
        """Adds one record."""
        is_first = not self._waiting
        self._waiting += _line(record).encode()
        if (error := self._write_waiting()) is not None and is_first:
            logger.warning("%s cannot be written (%s): its records wait in memory", self._file.name, error)

    def close(self) -> None:
        """Closes the file."""
        if (error := self._write_waiting()) is not None:
            logger.error("%d records are not in %s: %s", self._waiting.count(b"\n"), self._file.name, error)
        self._file.close()

    def _write_waiting(self) -> OSError | None:
        """Writes what waits, all of it or nothing; why not."""
        end = self._file.seek(0, os.SEEK_END)
        rest = memoryview(self._waiting)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._file.truncate(end)
            return error
        self._waiting = b""
        return None


def finite(record: dict[str, Any]) -> dict[str, Any]:
    """The record with None for every number that is not finite: JSON has no such numbers."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in record.items()
    }


def read_records(path: str) -> list[dict[str, Any]]:
    """All records of a metrics file, in order; lines that are no records (one cut by a kill) are left out."""
    records = []
    with open(path, "rb") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                records.append(record)
    return records


def free_name(path: str) -> str:
    """`path.old-<n>` with the smallest n from 1 that is not in use."""
    n = 1
    while os.path.lexists(f"{path}.old-{n}"):
        n += 1
    return f"{path}.old-{n}"


def move_aside(path: str) -> str:
    """Renames a file or folder to its `free_name`, which is returned."""
    aside = free_name(path)
    os.rename(path, aside)
    return aside


def _say_moved(path: str, aside: str) -> None:
    logger.info("fresh start: the earlier run's %s is now %s", path, aside)


def _read(path: str, step: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    records = read_records(path)
    return [one for one in records if one["step"] <= step], [one for one in records if one["step"] > step]


def _replace(path: str, records: list[dict[str, Any]]) -> None:
    with open(path + ".tmp", "w", encoding="utf-8") as file:
        file.writelines(map(_line, records))
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".tmp", path)


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, allow_nan=False) + "\n"
