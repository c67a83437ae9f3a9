"""In which order the GPU's clock does what it does, on a pretended GPU."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from mtmc_lsp.timing.worker import clock as clocks


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A pretended ``torch.cuda`` that notes what is done; work takes 40 us, all else nothing."""
    noted: list[str] = []
    state = SimpleNamespace(noted=noted, now=0.0, failed=False)

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = -1.0

        def record(self, stream: str) -> None:
            noted.append(f"record on {stream}")
            self.at = state.now

        def elapsed_time(self, end: Event) -> float:
            return (end.at - self.at) / 1e3

    buffer = SimpleNamespace(zero_=lambda: noted.append("flush"))
    memory = SimpleNamespace(allocated=100, peak=0)

    def reset_peak() -> None:
        memory.peak = memory.allocated

    cuda = SimpleNamespace(
        Event=Event,
        synchronize=lambda: noted.append("wait"),
        current_stream=lambda: "own stream",
        memory_allocated=lambda: memory.allocated,
        max_memory_allocated=lambda: memory.peak,
        reset_peak_memory_stats=reset_peak,
    )
    state.memory = memory
    monkeypatch.setattr(clocks, "torch", SimpleNamespace(cuda=cuda, empty=lambda *a, **k: buffer, int8=None))
    library = SimpleNamespace(cuCtxResetPersistingL2Cache=lambda: noted.append("reset") or int(state.failed))
    monkeypatch.setattr(clocks.ctypes, "CDLL", lambda name: library)
    state.cuda = cuda
    return state


class Selected:
    """A context that selects a stream. If it raises at its end, its stream stays selected, as with ``torch.cuda.graph``."""

    def __init__(self, gpu: SimpleNamespace, stream: str, *, is_capture: bool = False) -> None:
        self.gpu, self.stream, self.is_capture = gpu, stream, is_capture

    def __enter__(self) -> None:
        self.before, self.gpu.current = self.gpu.current, self.stream
        self.gpu.noted.append(f"begin {self.stream}")

    def __exit__(self, *error: object) -> None:
        if self.is_capture and self.gpu.fails_in_capture:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.gpu.current = self.before


@pytest.fixture
def streams(gpu: SimpleNamespace) -> SimpleNamespace:
    """The pretended GPU with streams, CUDA graphs, and a mode in which a wait for the device raises."""
    gpu.current, gpu.fails_in_capture, gpu.mode = SimpleNamespace(wait_stream=lambda other: None), False, 0
    gpu.cuda.current_stream = lambda: gpu.current
    gpu.cuda.Stream = lambda: SimpleNamespace(wait_stream=lambda other: None)
    gpu.cuda.CUDAGraph = lambda: SimpleNamespace(replay=lambda: None)
    gpu.cuda.stream = lambda stream: Selected(gpu, stream)
    gpu.cuda.graph = lambda graph: Selected(gpu, "capture", is_capture=True)
    gpu.cuda.get_sync_debug_mode = lambda: gpu.mode
    gpu.cuda.set_sync_debug_mode = lambda mode: setattr(gpu, "mode", mode)
    return gpu


def waiting_work(gpu: SimpleNamespace) -> None:
    work(gpu)
    if gpu.mode == "error":
        raise RuntimeError("called a synchronizing CUDA operation")


def test_a_call_that_waits_for_the_device_is_not_captured(streams: SimpleNamespace) -> None:
    clock = clocks.CudaClock()
    assert clock.captured(lambda: waiting_work(streams)) is None
    assert "begin capture" not in streams.noted
    assert streams.mode == 0
    assert clock.untouched()


@pytest.mark.parametrize("fails", [True, False])
def test_a_capture_leaves_the_clock_untouched_even_if_it_fails(streams: SimpleNamespace, fails: bool) -> None:
    clock = clocks.CudaClock()
    streams.fails_in_capture = fails
    assert (clock.captured(lambda: work(streams)) is None) == fails
    assert "begin capture" in streams.noted
    assert clock.untouched()


def test_a_call_that_selects_another_stream_is_noticed_after_a_failed_capture(streams: SimpleNamespace) -> None:
    clock = clocks.CudaClock()
    streams.current = SimpleNamespace(wait_stream=lambda other: None)
    streams.fails_in_capture = True
    assert clock.captured(lambda: work(streams)) is None
    assert not clock.untouched()


def work(gpu: SimpleNamespace) -> None:
    gpu.noted.append("work")
    gpu.now += 40.0


def test_each_cold_call_is_preceded_by_a_reset_and_a_flush(gpu: SimpleNamespace) -> None:
    clock = clocks.CudaClock()
    gpu.noted.clear()
    device_us, host_us = clock.cold(lambda: work(gpu))
    assert gpu.noted == ["reset", "flush", "record on own stream", "work", "record on own stream", "wait"]
    assert device_us == pytest.approx(40.0)
    assert host_us >= 0
    assert "persisting" in clock.method


def test_the_device_is_kept_busy_until_a_late_host_has_launched(gpu: SimpleNamespace) -> None:
    clock = clocks.CudaClock()
    gpu.noted.clear()
    clock.cold(lambda: work(gpu), ahead_us=150.0)
    flushes = gpu.noted.count("flush")
    assert gpu.noted == ["reset", *["flush"] * flushes, "record on own stream", "work", "record on own stream", "wait"]
    assert (flushes - 1) * clocks.FLUSH_US < 150.0 <= flushes * clocks.FLUSH_US


def test_a_batch_is_timed_between_two_waits_by_both_clocks(gpu: SimpleNamespace) -> None:
    clock = clocks.CudaClock()
    gpu.noted.clear()
    event_us, wall_us, launched_us = clock.batch(lambda: work(gpu), 3)
    assert gpu.noted == ["wait", "record on own stream", *["work"] * 3, "record on own stream", "wait"]
    assert event_us == pytest.approx(120.0)
    assert 0 < launched_us < wall_us


def test_where_nothing_persists_nothing_is_reset_or_claimed(gpu: SimpleNamespace) -> None:
    gpu.failed = True
    clock = clocks.CudaClock()
    gpu.noted.clear()
    clock.cold(lambda: work(gpu))
    assert "reset" not in gpu.noted
    assert "persisting" not in clock.method


@pytest.mark.parametrize("name", ["Event", "synchronize", "current_stream"])
def test_what_a_candidate_puts_in_place_of_the_clocks_is_noticed_and_not_used(gpu: SimpleNamespace, name: str) -> None:
    clock = clocks.CudaClock()
    assert clock.untouched()
    setattr(gpu.cuda, name, lambda *a, **k: None)
    assert not clock.untouched()
    assert clock.cold(lambda: work(gpu))[0] == pytest.approx(40.0)


def test_a_replaced_method_of_events_or_a_replaced_host_clock_is_noticed(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = clocks.CudaClock()
    with monkeypatch.context() as patch:
        patch.setattr(gpu.cuda.Event, "elapsed_time", lambda self, end: 1e-6)
        assert not clock.untouched()
        assert clock.cold(lambda: work(gpu))[0] == pytest.approx(40.0), "the true one is held from before"
    with monkeypatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: 0.0)
        assert not clock.untouched()
    assert clock.untouched()


def test_the_peak_memory_of_a_call_is_what_it_allocates_and_not_what_was_there(gpu: SimpleNamespace) -> None:
    clock = clocks.CudaClock()
    gpu.memory.peak = 900

    def call() -> None:
        gpu.memory.allocated += 30
        gpu.memory.peak = max(gpu.memory.peak, gpu.memory.allocated)
        gpu.memory.allocated -= 30

    assert clock.peak_bytes(call)[1] == 30
    # Functions that a candidate replaces have no effect.
    gpu.cuda.max_memory_allocated = lambda: 0
    assert clock.peak_bytes(call)[1] == 30
