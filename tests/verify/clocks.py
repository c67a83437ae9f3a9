"""A clock for machines without a GPU: every call has a cost, and passing time is counted, not waited for."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from mtmc_lsp.timing.worker import timing_commands


class Costing:
    """A call that takes so many microseconds on a pretended device, and perhaps more that its events do not see."""

    def __init__(
        self,
        work: Callable[[], Any],
        us: float,
        *,
        hidden_us: float = 0.0,
        graph_us: float | None = None,
        peak_bytes: int | None = None,
    ) -> None:
        self.work, self.us, self.hidden_us, self.graph_us = work, us, hidden_us, graph_us
        self.peak_bytes = peak_bytes

    def __call__(self) -> Any:
        return self.work()


class FakeClock:
    """Tells a call's cost, with noise; a function without a cost is one that wraps the only candidate."""

    method = "a pretended clock"

    def __init__(self, candidate: Costing, *, noise: float = 0.004, seed: int = 0, touched: bool = False) -> None:
        self._candidate, self._noise, self._touched = candidate, noise, touched
        self._random = random.Random(seed)
        self.calls = 0
        self.in_row_us = 5.0
        """What the host takes for each of many calls in a row."""

    def _cost(self, run: Any) -> Costing:
        return run if isinstance(run, Costing) else self._candidate

    def _noisy(self, us: float) -> float:
        return us * (1 + self._random.gauss(0, self._noise))

    def cold(self, run: Any, ahead_us: float = 0.0) -> tuple[float, float]:
        self.calls += 1
        run()
        return self._noisy(self._cost(run).us), 5.0

    def batch(self, run: Any, count: int) -> tuple[float, float, float]:
        for _ in range(count):
            run()
        cost = self._cost(run)
        event, wall = self._noisy(cost.us * count), self._noisy((cost.us + cost.hidden_us) * count) + 30.0
        return event, wall, self.in_row_us * count

    def captured(self, run: Any) -> Any:
        cost = self._cost(run)
        return Costing(cost.work, cost.graph_us) if cost.graph_us is not None else None

    def peak_bytes(self, run: Any) -> tuple[Any, int | None]:
        return run(), self._cost(run).peak_bytes

    def untouched(self) -> bool:
        return not self._touched


class SleepClock:
    """Time passes only where a call sleeps: it takes 100 us and what it slept, with noise, on a machine of any load."""

    method = "a clock that counts sleeps"

    def __init__(self, noise: float = 0.004) -> None:
        self._noise, self._random, self._slept_us = noise, random.Random(0), 0.0
        self._real_sleep = time.sleep

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Times the commands of a timing worker with this clock, in a fresh state."""
        monkeypatch.setattr(time, "sleep", self._sleep)
        monkeypatch.setattr(timing_commands, "make_clock", lambda: self)
        monkeypatch.setattr(timing_commands, "_state", {})

    def _sleep(self, seconds: float) -> None:
        # Our background threads really sleep. Autograd may run the timed backward pass in threads that Python did not start.
        if type(threading.current_thread()) is threading.Thread:
            self._real_sleep(seconds)
        else:
            self._slept_us += seconds * 1e6

    def cold(self, run: Any, ahead_us: float = 0.0) -> tuple[float, float]:
        us = self.batch(run, 1)[0]
        return us, us

    def batch(self, run: Any, count: int) -> tuple[float, float, float]:
        before = self._slept_us
        for _ in range(count):
            run()
        us = (100.0 * count + self._slept_us - before) * (1 + self._random.gauss(0, self._noise))
        return us, us, us

    def captured(self, run: Any) -> None:
        return None

    def peak_bytes(self, run: Any) -> tuple[Any, None]:
        return run(), None

    def untouched(self) -> bool:
        return True
