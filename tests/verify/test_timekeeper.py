"""Locks among processes, what NVML shows, and what is remembered: with a pretended GPU, and real files and processes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtmc_lsp.core.errors import GpuInUse
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.core.results import BaselineTime, Conditions, Ratio, Speed, Timing
from mtmc_lsp.core.workload import Capture, Environment, Target, TargetKind, Workload, WorkloadSource
from mtmc_lsp.process import gpu_lock
from mtmc_lsp.process.worker.kernel_compilation import compiling_unshared
from mtmc_lsp.report.phrases import timing_notes
from mtmc_lsp.timing.gpu_monitor import GpuSample, monitor_gpu, open_gpu
from mtmc_lsp.timing.messages import SeparateCandidate, TimeAnswer, TimeRequest
from mtmc_lsp.timing.timekeeper import Timekeeper, TimingCache

ONE = Ratio(1.0, 0.99, 1.01)
TIMING = Timing(
    50.0, (BaselineTime("eager", 100.0, Ratio(2.0, 1.9, 2.1), Speed.FASTER),), "eager", ONE, 60, "fake", 0.5
)
CAPTURE = Capture(
    Workload(Target("m.py", "f", TargetKind.FUNCTION, 1, 2), WorkloadSource.DIRECTIVE),
    Graph(inputs=(), nodes=(), outputs=(), returns="", sizes={"n": 1}),
    arguments=(),
    environment=Environment("3.12", "2.11", "3.6"),
    flops=1.0,
    bytes=1.0,
    module_name="m",
)
REQUEST = TimeRequest(CAPTURE, user_source="a", source="b", baselines=("compile",), bound_us=1.0, least_us=1.0)


class FakeGpu:
    """Slowed down for as many readings as it is told, and used by whom it is told."""

    def __init__(self, *reasons: tuple[str, ...], holders: dict[int, int] | None = None) -> None:
        self._reasons = list(reasons)
        self._holders = holders or {}
        self._latest, self._changed = 0.0, threading.Condition()

    def read(self) -> GpuSample:
        reasons = self._reasons[0] if self._reasons else ()
        with self._changed:
            self._latest = time.monotonic()
            self._changed.notify_all()
            return GpuSample(self._latest, 1980, 2619, 45, 300.0, reasons)

    def wait_for_reading(self, since: float) -> None:
        """Wait until the state was read at this time or later."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._latest >= since, 60)

    def holders(self) -> list[int]:
        return list(self._holders)

    def busy(self, since_us: int) -> dict[int, int]:
        return {pid: part for pid, part in self._holders.items() if part}

    def next(self) -> None:
        """From now on the reasons of the next measurement hold."""
        self._reasons = self._reasons[1:]


def keeper(
    folder: Path, gpu: FakeGpu | None = None, *, fresh: bool = False
) -> tuple[Timekeeper, list[TimeRequest], list[float]]:
    """A timekeeper, the commands that it had run, and its pauses."""
    asked: list[TimeRequest] = []
    pauses: list[float] = []

    def ask(request: TimeRequest, is_locked: bool) -> TimeAnswer:
        asked.append(request)
        began = time.monotonic()
        if gpu is not None:
            gpu.wait_for_reading(began)
        return TimeAnswer(TIMING, (began, time.monotonic()))

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        assert gpu is not None
        gpu.next()

    found = (gpu, "") if gpu is not None else (None, "NVML is not there")
    made = Timekeeper(ask, "GPU-test", cache=TimingCache(folder, fresh), find_gpu=lambda uuid: found, pause=pause)
    return made, asked, pauses


# What is remembered -----------------------------------------------------------------------------------------------


def test_what_was_measured_is_given_again_and_says_so(tmp_path: Path) -> None:
    first, asked, _ = keeper(tmp_path, FakeGpu())
    timing = first.time(REQUEST)
    assert not timing.cached
    assert timing.measured_at == pytest.approx(time.time(), abs=60)
    again, asked_again, _ = keeper(tmp_path, FakeGpu())
    known = again.time(replace(REQUEST, least_us=2.0))
    assert known == replace(timing, cached=True)
    assert (len(asked), len(asked_again)) == (1, 0)
    assert any(note.startswith("cached: measured at") and "--fresh" in note for note in timing_notes(known))
    assert not any("cached" in note for note in timing_notes(timing))


@pytest.mark.parametrize(
    "change",
    [
        {"user_source": "c"},
        {"source": "c"},
        {"capture": replace(CAPTURE, flops=2.0)},
        {"baselines": ("compile", "max-autotune")},
        {"previous": "c"},
        {"separate": SeparateCandidate(CAPTURE.workload.target, "[[], {}]")},
    ],
)
def test_another_source_graph_or_baseline_is_measured(tmp_path: Path, change: Any) -> None:
    made, asked, _ = keeper(tmp_path, FakeGpu())
    made.time(REQUEST)
    assert not made.time(replace(REQUEST, **change)).cached
    assert len(asked) == 2


def test_another_gpu_is_another_key(tmp_path: Path) -> None:
    cache = TimingCache(tmp_path)
    assert cache.key(REQUEST, "GPU-a") != cache.key(REQUEST, "GPU-b")


def test_fresh_measures_again_and_replaces_what_was_known(tmp_path: Path) -> None:
    keeper(tmp_path, FakeGpu())[0].time(REQUEST)
    made, asked, _ = keeper(tmp_path, FakeGpu(), fresh=True)
    assert not made.time(REQUEST).cached
    assert len(asked) == 1


def test_a_cache_that_cannot_be_read_or_written_is_no_failure(tmp_path: Path) -> None:
    made, _, _ = keeper(tmp_path, FakeGpu())
    made.time(REQUEST)
    next((tmp_path / "timings").iterdir()).write_text("{")
    assert not made.time(REQUEST).cached
    (tmp_path / "file").write_text("")
    blocked, _, _ = keeper(tmp_path / "file", FakeGpu())
    assert not blocked.time(REQUEST).cached


# How the GPU was --------------------------------------------------------------------------------------------------


def test_a_gpu_that_was_slowed_down_is_measured_once_more(tmp_path: Path) -> None:
    made, asked, pauses = keeper(tmp_path, FakeGpu(("thermal slowdown by hardware",)))
    timing = made.time(REQUEST)
    assert len(asked) == 2
    assert len(pauses) == 1
    assert timing.conditions.throttled == ()
    assert timing.conditions.sm_mhz == 1980


def test_one_that_stays_slow_is_marked(tmp_path: Path) -> None:
    hot = ("thermal slowdown by hardware",)
    made, asked, _ = keeper(tmp_path, FakeGpu(hot, hot))
    timing = made.time(REQUEST)
    assert len(asked) == 2
    assert timing.conditions.throttled == hot
    assert any("throttled" in note for note in timing_notes(timing))


def test_the_power_cap_is_noted_and_does_not_repeat_a_timing(tmp_path: Path) -> None:
    made, asked, _ = keeper(tmp_path, FakeGpu(("power cap",)))
    assert made.time(REQUEST).conditions.throttled == ("power cap",)
    assert len(asked) == 1


@pytest.fixture
def stranger() -> Iterator[int]:
    """A process of another program."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process.pid
    process.kill()
    process.wait()


def test_another_program_that_computes_makes_the_timing_void(tmp_path: Path, stranger: int) -> None:
    made, _, _ = keeper(tmp_path, FakeGpu(holders={stranger: 40}))
    with pytest.raises(GpuInUse, match=rf"\({stranger}\)"):
        made.time(REQUEST)
    assert not list(tmp_path.rglob("*.json")), "what is void is not remembered"


def test_one_that_only_holds_memory_is_marked(tmp_path: Path, stranger: int) -> None:
    timing = keeper(tmp_path, FakeGpu(holders={stranger: 0}))[0].time(REQUEST)
    assert str(stranger) in timing.conditions.others[0]
    assert timing.conditions.busy == ()
    assert any("other idle programs on the GPU" in note for note in timing_notes(timing))


def test_processes_that_cannot_be_seen_from_here_are_said_to_be_unknown(tmp_path: Path) -> None:
    """As in a container, where NVML reports the PIDs of the host."""
    timing = keeper(tmp_path, FakeGpu(holders={2**22 + 5: 90}))[0].time(REQUEST)
    assert timing.conditions.others == ()
    assert "cannot be identified" in timing.conditions.notes[0]


def test_a_number_of_another_namespace_is_no_program_here(tmp_path: Path, stranger: int) -> None:
    """The timed process holds memory on the GPU. If none of the numbers is its number, all are of another namespace."""
    hidden = 2**22 + 5
    timing = keeper(tmp_path, FakeGpu(holders={hidden: 90, stranger: 90}))[0].time(REQUEST)
    assert (timing.conditions.others, timing.conditions.busy) == ((), ())
    with pytest.raises(GpuInUse, match=rf"\({stranger}\)"):
        keeper(tmp_path / "ours", FakeGpu(holders={hidden: 90, stranger: 90, os.getpid(): 5}))[0].time(REQUEST)


def test_without_nvml_the_timing_says_what_is_not_known(tmp_path: Path) -> None:
    timing = keeper(tmp_path)[0].time(REQUEST)
    assert timing.conditions == Conditions(notes=("clocks and throttling are unknown: NVML is not there",))


def test_a_gpu_that_does_not_exist_is_a_reason_and_no_failure() -> None:
    gpu, why = open_gpu("GPU-00000000-0000-0000-0000-000000000000")
    assert gpu is None
    assert why


def test_an_nvml_that_fails_meanwhile_does_not_spoil_the_timing() -> None:
    was_read = threading.Event()

    class Failing(FakeGpu):
        def read(self) -> GpuSample:
            was_read.set()
            raise RuntimeError("GPU is lost")

    with monitor_gpu(Failing()) as watch:
        assert was_read.wait(60)
    assert "GPU is lost" in watch.conditions([0.0, time.monotonic()]).notes[0]


# Who may use the GPU when -----------------------------------------------------------------------------------------


@pytest.fixture
def own_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lock files of the test's own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> Callable[[threading.Thread], None]:
    """Waits until a thread waits for a lock that another holder has."""
    lock, waiting, changed = fcntl.flock, set[threading.Thread](), threading.Condition()

    def noted(handle: int, mode: int) -> None:
        try:
            lock(handle, mode | fcntl.LOCK_NB)
        except BlockingIOError:
            if mode & fcntl.LOCK_NB:
                raise
            with changed:
                waiting.add(threading.current_thread())
                changed.notify_all()
            lock(handle, mode)

    def wait(thread: threading.Thread) -> None:
        with changed:
            assert changed.wait_for(lambda: thread in waiting, 60)

    monkeypatch.setattr(fcntl, "flock", noted)
    return wait


@pytest.mark.usefixtures("own_locks")
def test_what_is_timed_is_alone_and_all_else_is_side_by_side() -> None:
    inside: list[str] = []
    most: dict[str, int] = {"use": 0, "time": 0}
    mixed: list[list[str]] = []
    mutex, met = threading.Lock(), threading.Barrier(3)

    def enter(kind: str, held: object, meets: bool = False) -> None:
        with held:
            with mutex:
                inside.append(kind)
                most[kind] = max(most[kind], inside.count(kind))
                if len(set(inside)) > 1:
                    mixed.append(list(inside))
            if meets:
                met.wait(60)
            time.sleep(0.03)
            with mutex:
                inside.remove(kind)

    first = [threading.Thread(target=enter, args=("use", gpu_lock.shared("g"), True)) for _ in range(2)]
    for thread in first:
        thread.start()
    met.wait(60)
    threads = [threading.Thread(target=enter, args=("use", gpu_lock.shared("g"))) for _ in range(4)]
    threads += [threading.Thread(target=enter, args=("time", gpu_lock.alone("g"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in (*first, *threads):
        thread.join(60)
    assert not mixed
    assert most["time"] == 1
    assert most["use"] > 1


@pytest.mark.usefixtures("own_locks")
def test_locks_can_be_made_for_one_who_looks_elsewhere_and_can_make_none(
    tmp_path: Path, blocked: Callable[[threading.Thread], None]
) -> None:
    folder = gpu_lock.lock_folder("g")
    assert len(list(Path(folder).glob("mtmc-gpu-g*.lock"))) == 2
    entered = threading.Event()

    def enter() -> None:
        with gpu_lock.shared("g", folder):
            entered.set()

    with gpu_lock.alone("g"):
        thread = threading.Thread(target=enter)
        thread.start()
        blocked(thread)
        assert not entered.is_set()
    assert entered.wait(60)
    thread.join(60)


@pytest.mark.usefixtures("own_locks")
def test_a_stream_of_users_cannot_keep_the_timer_waiting() -> None:
    stop = threading.Event()

    def use() -> None:
        while not stop.is_set():
            with gpu_lock.shared("g"):
                time.sleep(0.02)

    users = [threading.Thread(target=use) for _ in range(4)]
    for thread in users:
        thread.start()
    began = time.monotonic()
    with gpu_lock.alone("g"):
        waited = time.monotonic() - began
    stop.set()
    for thread in users:
        thread.join(20)
    assert waited < 60.0


@pytest.mark.usefixtures("own_locks")
def test_the_lock_holds_between_processes_and_ends_with_them(blocked: Callable[[threading.Thread], None]) -> None:
    code = "from mtmc_lsp.process.gpu_lock import alone\nimport tempfile, sys, time\ntempfile.tempdir = sys.argv[1]\n"
    code += "with alone('g'):\n    print('in', flush=True)\n    time.sleep(60)\n"
    holder = subprocess.Popen([sys.executable, "-c", code, tempfile.gettempdir()], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"in\n"
    entered = threading.Event()

    def enter() -> None:
        with gpu_lock.shared("g"):
            entered.set()

    thread = threading.Thread(target=enter)
    thread.start()
    blocked(thread)
    assert not entered.is_set()
    holder.kill()
    holder.wait()
    assert entered.wait(60)
    thread.join(20)


@pytest.mark.usefixtures("own_locks")
def test_a_worker_lets_a_timing_pass_between_two_pieces_of_its_work(
    blocked: Callable[[threading.Thread], None],
) -> None:
    folder = gpu_lock.lock_folder("g")

    def entering() -> tuple[threading.Thread, threading.Event]:
        entered = threading.Event()

        def enter() -> None:
            with gpu_lock.alone("g"):
                entered.set()

        thread = threading.Thread(target=enter)
        thread.start()
        return thread, entered

    returned: list[bool] = []
    with gpu_lock.sharing("g", folder, lambda: returned.append(entered.is_set())):
        gpu_lock.let_timings_pass()
        first, entered = entering()
        blocked(first)
        assert not entered.is_set(), "a piece of work is not disturbed"
        assert not returned
        deadline = time.monotonic() + 60
        while not entered.is_set() and time.monotonic() < deadline:
            gpu_lock.let_timings_pass()
        assert entered.is_set()
        assert returned and not returned[0], "memory that the worker does not use goes back before the timing begins"
        first.join(60)
        second, entered = entering()
        blocked(second)
        assert not entered.is_set(), "after the timing, the worker shares the GPU again"
    assert entered.wait(60)
    second.join(60)
    gpu_lock.let_timings_pass()


def holding(held: contextlib.AbstractContextManager[None]) -> tuple[threading.Thread, threading.Event]:
    """A thread that enters a lock, and the event that it has."""
    entered = threading.Event()

    def enter() -> None:
        with held:
            entered.set()

    thread = threading.Thread(target=enter)
    thread.start()
    return thread, entered


@pytest.mark.usefixtures("own_locks")
def test_a_worker_that_takes_samples_is_alone_and_shares_the_gpu_before_and_after(
    blocked: Callable[[threading.Thread], None],
) -> None:
    folder = gpu_lock.lock_folder("g")
    with gpu_lock.sharing("g", folder):
        before, entered = holding(gpu_lock.shared("g"))
        assert entered.wait(60)
        with gpu_lock.exclusively():
            between, entered = holding(gpu_lock.shared("g"))
            blocked(between)
            assert not entered.is_set()
        assert entered.wait(60)
        after, entered = holding(gpu_lock.alone("g"))
        blocked(after)
        assert not entered.is_set(), "the worker shares the GPU again"
    assert entered.wait(60)
    for thread in (before, between, after):
        thread.join(60)


@pytest.mark.usefixtures("own_locks")
def test_a_worker_lets_others_time_while_triton_compiles(
    monkeypatch: pytest.MonkeyPatch, blocked: Callable[[threading.Thread], None]
) -> None:
    from triton.runtime.jit import JITFunction

    def compile_kernel(*args: object, **kwargs: object) -> str:
        thread, entered = holding(gpu_lock.alone("g"))
        assert entered.wait(60)
        thread.join(60)
        return "compiled"

    monkeypatch.setattr(JITFunction, "_do_compile", compile_kernel)
    with gpu_lock.sharing("g", gpu_lock.lock_folder("g")):
        with compiling_unshared():
            assert JITFunction._do_compile() == "compiled"
        thread, entered = holding(gpu_lock.alone("g"))
        blocked(thread)
        assert not entered.is_set(), "the worker shares the GPU again"
    assert JITFunction._do_compile is compile_kernel
    thread.join(60)
