"""Notes work of a candidate in other threads than the caller's. Runs in workers.

Results that a thread computes after the call are not there when the caller reads them. Kernels that another thread launches run
on the stream of that thread, which does not wait for the caller.
"""

from __future__ import annotations

import _thread
from collections.abc import Callable, Collection
from typing import Any


class ThreadWatch:
    """Notes threads during calls. It counts threads that the threading module does not know, too."""

    def __init__(self) -> None:
        """Begin before the candidate is imported: its import may start threads, too."""
        self._before = _thread._count()
        self._callers = set[int]()
        self._most_left = 0

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function; a thread that it starts must end before it returns."""
        before = _thread._count()
        self._callers.add(_thread.get_ident())
        try:
            return function(*args, **kwargs)
        finally:
            self._most_left = max(self._most_left, _thread._count() - before)

    def left(self) -> int:
        """How many threads of the candidate ran on after a call, or still run."""
        return max(self._most_left, _thread._count() - self._before)

    def others(self, threads: Collection[int]) -> int:
        """How many of these threads are no callers; 0 if no call was watched."""
        return len(set(threads) - self._callers) if self._callers else 0
