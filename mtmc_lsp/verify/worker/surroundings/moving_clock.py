"""Clocks that jump forward between calls, from seconds to years: results must not depend on when a call runs. Runs in workers."""

from __future__ import annotations

import datetime
import itertools
import random
import time
from collections.abc import Callable
from typing import Any

SECOND = 1_000_000_000
DAY = 24 * 3600
JUMPS = (1, 61, 3601, 7 * 3600, DAY, 3 * DAY, 31 * DAY, 366 * DAY, 1000 * DAY)
"""Seconds by which the clocks jump, in turn; each is stretched by a random factor of up to two."""
CLOCKS = ("time", "monotonic", "perf_counter", "process_time", "thread_time")
OF_NOW = ("localtime", "gmtime", "ctime")
"""Functions whose first argument is a time, by default now."""


class MovingClock:
    """The clocks of this process, with an offset that grows."""

    def __init__(self, seed: int) -> None:
        """Replace Python's clocks for the rest of the process."""
        self._offset = 0
        self._draw = random.Random(seed).random
        self._jumps = itertools.cycle(JUMPS)
        self._now: Callable[[], float] = time.time
        for name in CLOCKS:
            self._replace(name, SECOND)
            self._replace(f"{name}_ns", 1)
        self._replace("clock_gettime", SECOND)
        self._replace("clock_gettime_ns", 1)
        for name in OF_NOW:
            self._replace_of_now(name)
        self._replace_formatted()
        datetime.datetime, datetime.date = _dates(self._moved_now)  # type: ignore[misc]

    def advance(self) -> None:
        """Jump to a later time."""
        self._offset += int(next(self._jumps) * (1 + self._draw()) * SECOND)

    def _moved_now(self) -> float:
        return self._now() + self._offset / SECOND

    def _replace(self, name: str, unit: int) -> None:
        original = getattr(time, name, None)
        if original is None:
            return

        def clock(*arguments: Any) -> Any:
            return original(*arguments) + (self._offset / unit if unit > 1 else self._offset)

        _set(name, clock)

    def _replace_of_now(self, name: str) -> None:
        original = getattr(time, name)

        def of_now(seconds: float | None = None) -> Any:
            return original(self._moved_now() if seconds is None else seconds)

        _set(name, of_now)

    def _replace_formatted(self) -> None:
        formatted, as_text, local = time.strftime, time.asctime, time.localtime

        def strftime(form: str, *when: Any) -> str:
            return formatted(form, *(when or (local(),)))

        def asctime(*when: Any) -> str:
            return as_text(*(when or (local(),)))

        _set("strftime", strftime)
        _set("asctime", asctime)


def _set(name: str, function: Callable[..., Any]) -> None:
    function.__name__ = function.__qualname__ = name
    function.__module__ = "time"
    setattr(time, name, function)


def _dates(now: Callable[[], float]) -> tuple[Any, Any]:
    """Classes for dates that know the moved time. Instances of the original classes are instances of them."""
    original: Any = datetime.datetime
    original_date: Any = datetime.date

    class OfOriginal(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original if issubclass(cls, original) else original_date)

    class Moved(original, metaclass=OfOriginal):  # type: ignore[misc]
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Any:
            return cls.fromtimestamp(now(), tz)

        @classmethod
        def utcnow(cls) -> Any:
            return cls.fromtimestamp(now(), datetime.timezone.utc).replace(tzinfo=None)

        @classmethod
        def today(cls) -> Any:
            return cls.fromtimestamp(now())

    class MovedDate(original_date, metaclass=OfOriginal):  # type: ignore[misc]
        @classmethod
        def today(cls) -> Any:
            return cls.fromtimestamp(now())

    for kind, name in ((Moved, "datetime"), (MovedDate, "date")):
        kind.__name__ = kind.__qualname__ = name
        kind.__module__ = "datetime"
    return Moved, MovedDate
