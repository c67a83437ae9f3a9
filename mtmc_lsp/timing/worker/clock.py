"""The clocks of a GPU: one call with a cold L2, and many calls by two clocks that must agree. Runs in workers."""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

FLUSH_BYTES = 256 << 20
"""More than twice the L2 of any GPU of today; writing it also takes longer than launching most kernels."""
FLUSH_US = FLUSH_BYTES / 8e6
"""It takes this many microseconds at least: no memory of today takes more than 8 TB/s."""

Run = Callable[[], Any]


class Clock(Protocol):
    """What times calls; rules about samples are tested with another one than the GPU's."""

    method: str
    """How it measures, in words."""

    def cold(self, run: Run, ahead_us: float = 0.0) -> tuple[float, float]:
        """Microseconds of one call: on the device with a cold L2, and on the host until it returned.

        The device is busy for at least ``ahead_us`` before, so that a host that is late by less is not timed.
        """

    def batch(self, run: Run, count: int) -> tuple[float, float, float]:
        """Microseconds of ``count`` calls back to back, with a warm L2.

        By the device's events, by the host's wall, and on the host until all were launched.
        """

    def captured(self, run: Run) -> Run | None:
        """The call as a replay of a CUDA graph; None where it cannot be captured."""

    def untouched(self) -> bool:
        """Whether what it measures with is what it was before any candidate was loaded."""


class CudaClock:
    """CUDA events on the stream that calls run on, and the host's clock.

    It holds what it needs from before a candidate is loaded: replacing ``torch.cuda.Event`` or ``time.perf_counter``
    afterwards changes nothing here, and is noticed.
    """

    method = "CUDA events, L2 flushed and its persisting lines reset before each call"

    def __init__(self) -> None:
        self._event, self._elapsed = torch.cuda.Event, torch.cuda.Event.elapsed_time
        self._record = torch.cuda.Event.record
        self._synchronize, self._now = torch.cuda.synchronize, time.perf_counter
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
                for _ in range(3):
                    run()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
        except RuntimeError:
            # Code that synchronises or allocates on the host cannot be captured; it is then timed without a graph only.
            self._synchronize()
            return None
        replay: Run = graph.replay
        return replay

    def untouched(self) -> bool:
        # A function kept in a variable is compared by identity; one read from a class is made anew each time.
        return (
            torch.cuda.Event is self._event
            and torch.cuda.Event.elapsed_time == self._elapsed
            and torch.cuda.Event.record == self._record
            and torch.cuda.synchronize is self._synchronize
            and time.perf_counter is self._now
            and torch.cuda.current_stream() == self._stream
        )


def _persisting_reset() -> Callable[[], Any] | None:
    """What makes lines of the L2 that a kernel asked to keep normal again: a flush does not evict those."""
    try:
        reset = ctypes.CDLL("libcuda.so.1").cuCtxResetPersistingL2Cache
    except (OSError, AttributeError):
        return None
    # GPUs without persisting lines say that it is not supported; then there is nothing to reset.
    return reset if reset() == 0 else None
