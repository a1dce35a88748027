"""What ranks tell each other over the store: errors, differences, the end of a long job, a notice, the farewell."""

from __future__ import annotations

import json
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ppfleetx.config.errors import Problem, UserError
from ppfleetx.distributed.store import JobStore

T = TypeVar("T")

#: how long a rank waits for the others where all should come at about the same time, and at the end of the run
MEETING_TIMEOUT_S = 1800.0
#: differences between ranks that are told at once
_SHOWN = 8


class Meetings:
    """Meetings of all ranks of the job. Each is numbered, so all ranks must hold the same ones in the same order.

    Args:
        store: the job's.
        name: tells these meetings from others over the same store.
    """

    def __init__(self, store: JobStore, name: str = ""):
        self._store = store
        self._name = name
        self._held: Counter[str] = Counter()

    def beside(self, name: str) -> Meetings:
        """Other meetings of the same ranks, which another thread may hold meanwhile; every rank calls it."""
        return Meetings(self._store.another(), f"{self._next(name)}/")

    def notice(self, name: str) -> Notice:
        """A new notice board entry; every rank calls it."""
        return Notice(self._store, self._next(name))

    def agree(self, problem: UserError | None, timeout_s: float = MEETING_TIMEOUT_S) -> None:
        """Return on all ranks if none has a problem; else raise the lowest such rank's UserError on all.

        Every rank calls it, with its own error or None. A barrier too. RuntimeError after `timeout_s`.
        """
        store, key = self._store, self._next("agree")
        store.put(f"{key}/{store.rank}", _encode(problem))
        if store.rank == 0:
            said = [store.take(f"{key}/{rank}", timeout_s, f"rank {rank} to agree") for rank in range(store.world_size)]
            store.put(key, next((text for text in said if text), ""))
        found = store.take(key, timeout_s, "all ranks to agree")
        if found:
            self._leave_together(key, timeout_s)
            raise _decode(found)

    def rank0_first(self, name: str, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 while the others wait for its end, however long it takes; all get its result.

        Every rank calls it; the result must be a JSON value.
        If `work` fails, rank 0 raises its error; the others raise a RuntimeError naming the phase,
        or the same error if it is a UserError.
        """
        store, key = self._store, self._next("phase")
        if store.rank != 0:
            outcome = json.loads(store.take(key, None, name))
            if outcome["problem"]:
                store.count(f"{key}/left")
                raise _decode(outcome["problem"])
            if outcome["failure"]:
                raise RuntimeError(f"rank 0 failed in phase {name!r}: {outcome['failure']}")
            return outcome["result"]
        try:
            result = work()
        except UserError as error:
            store.put(key, json.dumps({"problem": _encode(error), "failure": ""}))
            self._leave_together(key, MEETING_TIMEOUT_S)
            raise
        except BaseException as error:
            store.put(key, json.dumps({"problem": "", "failure": f"{type(error).__name__}: {error}"}))
            raise
        store.put(key, json.dumps({"problem": "", "failure": "", "result": result}))
        return result

    def same(self, values: Mapping[str, Any], timeout_s: float = MEETING_TIMEOUT_S) -> None:
        """Return on all ranks if all hold rank 0's values (JSON, by name); else raise one UserError on all, which names what
        the lowest rank that differs holds. Every rank calls it."""
        own: dict[str, Any] = json.loads(json.dumps(values))  # a tuple that travelled is a list
        right: dict[str, Any] = self.rank0_first("comparing with rank 0", lambda: own)
        rank, host = self._store.rank, socket.gethostname()
        problems = [
            Problem(
                name,
                own.get(name),
                f"rank {rank} (on {host}) has this, rank 0 has {right.get(name)!r}, and all must have the same",
                "start every node with the same configuration, code and data",
            )
            for name in sorted(own.keys() | right.keys())
            if own.get(name) != right.get(name)
        ]
        self.agree(UserError(*problems[:_SHOWN]) if problems else None, timeout_s)

    def farewell(self, timeout_s: float = MEETING_TIMEOUT_S) -> None:
        """Say that this rank needs nobody any more; rank 0, who serves the store, stays until all have said so."""
        self._leave_together(self._next("farewell"), timeout_s)

    def _leave_together(self, key: str, timeout_s: float) -> None:
        """Rank 0 takes the store with it when it exits, so it leaves last."""
        store = self._store
        store.count(f"{key}/left")
        if store.rank == 0:
            store.wait_for_count(f"{key}/left", store.world_size, timeout_s, "the other ranks to leave")

    def _next(self, kind: str) -> str:
        self._held[kind] += 1
        return f"{self._name}{kind}/{self._held[kind]}"


class Notice:
    """A text that any rank may post and every rank may look for, without waiting for anybody. Posted more than once, the
    last text stands.

    Args:
        store: where it is posted; None: one process, which keeps it itself.
        key: its place there.
    """

    def __init__(self, store: JobStore | None, key: str = ""):
        self._store, self._key = store, key
        self._text: str | None = None

    def post(self, text: str) -> None:
        """Make `text` visible to all."""
        self._text = text
        if self._store is not None:
            self._store.put(self._key, text)

    def read(self) -> str | None:
        """What was posted, by whomever; None so far. One request."""
        if self._store is not None and self._store.count(f"{self._key}/there", 0):
            self._text = self._store.take(self._key, None, "a notice")
        return self._text


class _Printed:
    """A value of which only the printed form travelled."""

    def __init__(self, text: str):
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _encode(error: UserError | None) -> str:
    """The error's problems as text; an empty text for None."""
    if error is None:
        return ""
    return json.dumps([[one.key, repr(one.value), one.rule, one.fix] for one in error.problems])


def _decode(text: str) -> UserError:
    return UserError(*(Problem(key, _Printed(value), rule, fix) for key, value, rule, fix in json.loads(text)))
