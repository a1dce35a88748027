"""Faults of the disk while a checkpoint is written."""

from __future__ import annotations

import os
import signal
from typing import Any

#: what a save does to the disk, in the module os
CALLS = ("open", "write", "fsync", "replace", "mkdir", "unlink", "rmdir")


class Strike:
    """Counts the disk operations of a save; the `number`-th raises `error`, or kills the process with SIGKILL if there is
    none, before it happens or after it (a write: half-way).

    Args:
        patch: has setattr, as pytest's monkeypatch.
    """

    def __init__(self, patch: Any, number: int = -1, after: bool = False, error: BaseException | None = None):
        self.count, self.number, self.after, self.error = 0, number, after, error
        for name in CALLS:
            patch.setattr(os, name, self._wrapped(name, getattr(os, name)))

    def _wrapped(self, name: str, call: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.count != self.number:
                return call(*args, **kwargs)
            if self.after:
                if name == "write":
                    args = (args[0], args[1][: len(args[1]) // 2])
                call(*args, **kwargs)
            if self.error is None:
                os.kill(os.getpid(), signal.SIGKILL)
            raise self.error  # type: ignore[misc]

        return wrapped
