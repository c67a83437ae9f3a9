"""The timing of edited kernels against the file as it stands, by a clock that counts sleeps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from clocks import SleepClock

from mtmc_lsp.core.errors import MeasurementRejected
from mtmc_lsp.core.results import Speed, Timing
from mtmc_lsp.core.workload import Workload, WorkloadSource
from mtmc_lsp.kernels.messages import ROW_METHOD, KernelTimeRequest
from mtmc_lsp.kernels.worker import time_command
from mtmc_lsp.source.targets import find_target

SLOW = """\
import time

import torch


def work(n=3):
    time.sleep(0.0008)
    return torch.ones(n)
"""
FAST = SLOW.replace("0.0008", "0.0002")


@pytest.fixture
def timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Times a version of a file against it."""
    SleepClock().install(monkeypatch)
    path = str(tmp_path / "model.py")
    # A directive without arguments: the call has no inputs.
    workload = Workload(find_target(SLOW.encode(), path, "work"), WorkloadSource.DIRECTIVE)

    def time(original: str, source: str, previous: str = "", least_us: float = 0.0) -> Timing:
        request = KernelTimeRequest(workload, original, source, previous, bound_us=1.0, least_us=least_us, seconds=0.5)
        return time_command.time_kernels(request).timing

    return time


def test_a_faster_version_is_compared_with_the_file_and_the_version_before(timed: Any) -> None:
    timing = timed(SLOW, FAST, previous=SLOW)
    assert timing.speed_over("eager") is Speed.FASTER
    assert timing.speed_over("previous") is Speed.FASTER
    assert timing.median_us < timing.baseline("eager").median_us
    assert timing.noise.low < 1.3
    # The host sleeps, so it bounds rows of calls, too.
    assert timing.rows is not None and timing.rows.method == ROW_METHOD
    assert timing.rows.speed_over("previous") is Speed.FASTER
    assert {baseline.name for baseline in timing.rows.baselines} == {"eager", "previous"}


def test_of_long_calls_no_rows_are_timed(timed: Any) -> None:
    assert timed(SLOW.replace("0.0008", "0.004"), SLOW.replace("0.0008", "0.002")).rows is None


def test_a_slower_version_is_slower(timed: Any) -> None:
    assert timed(FAST, SLOW).speed_over("eager") is Speed.SLOWER


def test_a_time_that_the_memory_does_not_allow_is_rejected(timed: Any) -> None:
    with pytest.raises(MeasurementRejected, match="the measurement cannot be right"):
        timed(SLOW, FAST, least_us=1e9)


TUNED = """\
import torch
from triton.runtime.autotuner import Autotuner, Config


class Kernel:
    def run(self, **kwargs):
        pass


class Tuned(Autotuner):
    def __init__(self):
        self.fn = Kernel()
        self.configs = [Config({"BLOCK": 128}), Config({"BLOCK": 256})]


kernel = Tuned()


def work(n=3):
    kernel.run()
    return torch.ones(n)
"""


def test_an_autotuner_measures_its_configurations_while_nothing_else_uses_the_gpu(
    timed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.autotuner import Autotuner

    events: list[object] = []

    @contextlib.contextmanager
    def exclusively() -> Iterator[None]:
        events.append("alone")
        yield

    monkeypatch.setattr(time_command, "exclusively", exclusively)
    monkeypatch.setattr(Autotuner, "run", lambda self: events.append(len(self.configs)))
    timed(SLOW, TUNED)
    begins = events.index("alone")
    assert set(events[:begins]) == {1}
    assert events[begins + 1] == 2


def test_the_gpu_is_used_alone_for_samples_only(timed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait for others is not part of the time in which nothing else may run, and peaks of memory need no silence."""
    events: list[str] = []

    @contextlib.contextmanager
    def exclusively() -> Iterator[None]:
        clock_time.now += 100.0
        events.append("alone")
        yield
        events.append("shared")

    class Seconds:
        now = 0.0

        def monotonic(self) -> float:
            return self.now

    clock_time = Seconds()
    peak_bytes = SleepClock.peak_bytes

    def noted(clock: SleepClock, run: Any) -> Any:
        events.append("peak")
        return peak_bytes(clock, run)

    monkeypatch.setattr(SleepClock, "peak_bytes", noted)
    monkeypatch.setattr(time_command, "exclusively", exclusively)
    monkeypatch.setattr(time_command, "time", clock_time)
    SleepClock().install(monkeypatch)
    workload = Workload(find_target(SLOW.encode(), str(tmp_path / "model.py"), "work"), WorkloadSource.DIRECTIVE)
    request = KernelTimeRequest(workload, SLOW, FAST, "", bound_us=1.0, least_us=0.0, seconds=0.5)
    assert time_command.time_kernels(request).window == (100.0, 100.0)
    assert events == ["alone", "shared", "peak", "peak"]


def test_of_a_test_in_the_file_only_the_outermost_launches_are_repeated() -> None:
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    calls = []

    class Kernel(JITFunction):
        def __init__(self) -> None:
            pass

    class Tuned(Autotuner):
        def __init__(self) -> None:
            pass

    originals = JITFunction.run, Autotuner.run
    try:
        JITFunction.run = lambda self, *args, **kwargs: calls.append(args)  # type: ignore[method-assign, assignment]
        Autotuner.run = lambda self, *args, **kwargs: JITFunction.run(Kernel(), *args)  # type: ignore[method-assign]
        launches: list[Any] = []
        with time_command.recording_launches(launches):
            Tuned().run(torch.ones(1))
            Kernel().run(torch.zeros(1))
        assert len(launches) == 2
        assert len(calls) == 2
        for launch in launches:
            launch()
        assert len(calls) == 4
    finally:
        JITFunction.run, Autotuner.run = originals  # type: ignore[method-assign]
