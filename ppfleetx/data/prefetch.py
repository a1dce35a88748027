"""Mapping a function over a stream in an executor, results in the stream's order, a bounded number ahead."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Executor, Future
from typing import TypeVar

_In = TypeVar("_In")
_Out = TypeVar("_Out")


def ordered_map(
    executor: Executor, function: Callable[[_In], _Out], items: Iterable[_In], ahead: int
) -> Generator[_Out, None, None]:
    """Like `map`, with up to `ahead` calls under way; an exception of a call is raised in its place.

    Takes the executor over: it is shut down when the iterator ends, fails or is closed, and calls that have not begun
    are dropped.
    """
    with executor:
        stream = iter(items)
        waiting: deque[Future[_Out]] = deque()
        try:
            for item in itertools.islice(stream, ahead):
                waiting.append(executor.submit(function, item))
            while waiting:
                result = waiting.popleft().result()
                for item in itertools.islice(stream, 1):
                    waiting.append(executor.submit(function, item))
                yield result
        finally:
            for future in waiting:
                future.cancel()
