"""Clocks for GPU timings: single calls with a cold L2, and batches of calls by two clocks. Runs in workers."""

from __future__ import annotations

import contextlib
import ctypes
import math
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

FLUSH_BYTES = 256 << 20
"""More than twice the L2 of any current GPU; filling it also takes longer than launching most kernels."""
FLUSH_US = FLUSH_BYTES / 8e6
"""Minimum time of one flush in microseconds: no current memory exceeds 8 TB/s."""

Run = Callable[[], Any]


class Clock(Protocol):
    """Interface of a clock; tests of sampling use a fake one."""

    method: str
    """Description of the method, for the user."""

    def cold(self, run: Run, ahead_us: float = 0.0) -> tuple[float, float]:
        """Device microseconds of one call with a cold L2, and host microseconds until it returned.

        The device is kept busy for at least ``ahead_us`` before the call, which hides a shorter host delay.
        """

    def batch(self, run: Run, count: int) -> tuple[float, float, float]:
        """Microseconds of ``count`` calls back to back with a warm L2.

        Returns the time by the device's events, the host's wall time, and the host's time to launch all calls.
        """

    def captured(self, run: Run) -> Run | None:
        """The call as a replay of a CUDA graph; None if it cannot be captured."""

    def peak_bytes(self, run: Run) -> tuple[Any, int | None]:
        """The result of one call, and the most memory of the device that it allocates, beyond what is allocated before; None if
        unknown."""

    def untouched(self) -> bool:
        """Whether the timing functions are unchanged since before any candidate was loaded."""


class CudaClock:
    """CUDA events on the current stream, and the host's clock.

    It saves the functions that it needs before a candidate is loaded: replacing ``torch.cuda.Event`` or
    ``time.perf_counter`` later has no effect here, and is detected.
    """

    method = "CUDA events, L2 flushed and its persisting lines reset before each call"

    def __init__(self) -> None:
        self._event, self._elapsed = torch.cuda.Event, torch.cuda.Event.elapsed_time
        self._record = torch.cuda.Event.record
        self._synchronize, self._now = torch.cuda.synchronize, time.perf_counter
        self._allocated, self._peak = torch.cuda.memory_allocated, torch.cuda.max_memory_allocated
        self._reset_peak = torch.cuda.reset_peak_memory_stats
        self._stream = torch.cuda.current_stream()
        self._buffer = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
        self._reset = _persisting_reset()
        if self._reset is None:
            self.method = "CUDA events, L2 flushed before each call"

    def cold(self, run: Run, ahead_us: float = 0.0) -> tuple[float, float]:
        start, end = self._event(enable_timing=True), self._event(enable_timing=True)
        if self._reset is not None:
            self._reset()
        for _ in range(max(1, math.ceil(ahead_us / FLUSH_US))):
            self._buffer.zero_()
        self._record(start, self._stream)
        began = self._now()
        run()
        host = self._now() - began
        self._record(end, self._stream)
        self._synchronize()
        return float(self._elapsed(start, end)) * 1e3, host * 1e6

    def batch(self, run: Run, count: int) -> tuple[float, float, float]:
        start, end = self._event(enable_timing=True), self._event(enable_timing=True)
        self._synchronize()
        began = self._now()
        self._record(start, self._stream)
        for _ in range(count):
            run()
        launched = self._now() - began
        self._record(end, self._stream)
        self._synchronize()
        wall = self._now() - began
        return float(self._elapsed(start, end)) * 1e3, wall * 1e6, launched * 1e6

    def captured(self, run: Run) -> Run | None:
        try:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    run()
                # A capture that fails leaves torch's allocator and random generators in the middle of it.
                with _error_if_it_waits():
                    run()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # A capture that fails leaves its stream as the current one; the outer context restores the stream before it.
            with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
                run()
        except RuntimeError:
            # Code that synchronises or allocates on the host cannot be captured; it is timed only without a graph.
            self._synchronize()
            return None
        replay: Run = graph.replay
        return replay

    def peak_bytes(self, run: Run) -> tuple[Any, int | None]:
        # Results of earlier calls are freed; what the call keeps from call to call is allocated before.
        self._synchronize()
        before = self._allocated()
        self._reset_peak()
        result = run()
        self._synchronize()
        return result, int(self._peak() - before)

    def untouched(self) -> bool:
        # Functions in variables are compared by identity; methods read from a class are new objects each time.
        return (
            torch.cuda.Event is self._event
            and torch.cuda.Event.elapsed_time == self._elapsed
            and torch.cuda.Event.record == self._record
            and torch.cuda.synchronize is self._synchronize
            and time.perf_counter is self._now
            and torch.cuda.current_stream() == self._stream
        )


@contextlib.contextmanager
def _error_if_it_waits() -> Iterator[None]:
    """Make torch raise ``RuntimeError`` where the host waits for the device, for example in ``.item()`` or ``nonzero``."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # Torch warns once that it does not detect all such calls.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _persisting_reset() -> Callable[[], Any] | None:
    """The driver function that resets persisting L2 lines to normal, because a flush does not evict them; None if missing."""
    try:
        reset = ctypes.CDLL("libcuda.so.1").cuCtxResetPersistingL2Cache
    except (OSError, AttributeError):
        return None
    # GPUs without persisting lines return an error; then there is nothing to reset.
    return reset if reset() == 0 else None
