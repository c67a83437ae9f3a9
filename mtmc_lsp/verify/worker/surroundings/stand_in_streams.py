"""Streams of a GPU for a program on the CPU, which show launches that no synchronisation orders. Runs in workers.

Work on one stream runs in order. Work on two streams has no order unless one waits for the other. So each stream has a clock for
each stream: how much of that stream's work ended before its next work begins. A launch must come after the work that the caller's
stream had when the candidate was called, because that may compute the inputs. The caller's stream must wait for the launch before
the call returns, because the caller reads the results on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

UNORDERED_BEFORE = (
    "it launches a kernel on a stream that does not wait for the caller's, which may still compute the inputs"
)
UNORDERED_AFTER = "the caller's stream does not wait for a kernel that it launched on another stream"
LEFT_CURRENT = "another stream than the caller's is current after the call"
DEFAULT_NUMBER = 0
Clock = dict[int, int]
"""By the number of a stream, how much of its work has ended."""


class Streams:
    """All streams of this process, and which is current."""

    def __init__(self) -> None:
        """Begin with the default stream, and a stream of the program besides it, both without work."""
        self._clocks: dict[int, Clock] = {}
        self._calls = 0
        self.default = Stream(streams=self)
        self._side = Stream(streams=self)
        self.current = self.default
        self._caller = self.default
        self._begin: Clock = {}
        self._launched: list[tuple[Stream, int]] = []
        self.unordered = ""
        """What was wrong in a call so far; empty if nothing was."""

    def register(self) -> int:
        """The number of a new stream."""
        number = len(self._clocks)
        self._clocks[number] = {number: 0}
        return number

    def clock(self, stream: Stream) -> Clock:
        """How much of each stream's work ends before further work of this one begins."""
        return self._clocks[stream.stream_id]

    def call(self, function: Callable[[], Any]) -> Any:
        """Call the candidate, in turn on the default stream and on the other one, on which the program has just worked."""
        self._caller = self.current = self._side if self._calls % 2 else self.default
        self._calls += 1
        self._begin = dict(self._work(self._caller))
        self._launched.clear()
        try:
            result = function()
        finally:
            is_caller, self.current = self.current is self._caller, self._caller
        if not is_caller:
            self.unordered = self.unordered or LEFT_CURRENT
        ends = self.clock(self._caller)
        if any(ends.get(stream.stream_id, 0) < time for stream, time in self._launched):
            self.unordered = self.unordered or UNORDERED_AFTER
        return result

    def launch(self) -> None:
        """The candidate launches a kernel on the current stream."""
        clock, caller = self._work(self.current), self._caller.stream_id
        if clock.get(caller, 0) < self._begin.get(caller, 0):
            self.unordered = self.unordered or UNORDERED_BEFORE
        self._launched.append((self.current, clock[self.current.stream_id]))

    def wait(self, stream: Stream, clock: Clock) -> None:
        """Later work of a stream begins after what a clock contains."""
        ours = self.clock(stream)
        for number, time in clock.items():
            ours[number] = max(time, ours.get(number, 0))

    def synchronize(self, clock: Clock | None = None) -> None:
        """The program waits for what a clock contains, or for all work. So does the later work of all streams."""
        done: Clock = clock if clock is not None else {number: own[number] for number, own in self._clocks.items()}
        for each in self._clocks.values():
            each.update({number: max(time, each.get(number, 0)) for number, time in done.items()})

    def _work(self, stream: Stream) -> Clock:
        clock = self.clock(stream)
        clock[stream.stream_id] += 1
        return clock


class Stream:
    """Like ``torch.cuda.Stream``."""

    streams: Streams

    def __init__(self, device: Any = None, priority: int = 0, *, streams: Streams | None = None, **_: Any) -> None:
        """Create a stream without work."""
        self._streams = streams or type(self).streams
        self.stream_id = self._streams.register()
        # The default stream is 0; others have addresses.
        self.cuda_stream = self.stream_id and 0x7F0000000000 + 64 * self.stream_id
        self.device, self.device_index, self.priority = torch.device("cuda", 0), 0, priority
        self._before: list[Stream] = []

    def wait_stream(self, stream: Stream) -> None:
        """Let later work wait for the work of another stream so far."""
        self._streams.wait(self, self._streams.clock(stream))

    def wait_event(self, event: Event) -> None:
        """Let later work wait for an event."""
        self._streams.wait(self, event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        """An event that happens when the work so far has ended."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Wait for all work of this stream."""
        self._streams.synchronize(dict(self._streams.clock(self)))

    def query(self) -> bool:
        """Tell that all work has ended, without waiting for it."""
        return True

    def __enter__(self) -> Stream:
        """Make it current."""
        self._before.append(self._streams.current)
        self._streams.current = self
        return self

    def __exit__(self, *_: object) -> None:
        """Make the earlier one current."""
        self._streams.current = self._before.pop()


class Event:
    """Like ``torch.cuda.Event``."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Create an event that was not recorded."""
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        """Let it happen when the work of a stream so far has ended."""
        streams = Stream.streams
        self.clock = dict(streams.clock(stream or streams.current))

    def wait(self, stream: Stream | None = None) -> None:
        """Let later work of a stream wait."""
        streams = Stream.streams
        streams.wait(stream or streams.current, self.clock)

    def synchronize(self) -> None:
        """Wait until it happens."""
        Stream.streams.synchronize(dict(self.clock))

    def query(self) -> bool:
        """Tell that it has happened, without waiting for it."""
        return True

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds between two events, which a CPU cannot tell."""
        return 1.0


class StreamContext:
    """Like ``torch.cuda.stream(...)``."""

    def __init__(self, stream: Stream | None) -> None:
        """Prepare a context in which a stream is current."""
        self.stream = stream

    def __enter__(self) -> None:
        """Make it current."""
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(self, *_: object) -> None:
        """Make the earlier one current."""
        if self.stream is not None:
            self.stream.__exit__()


def stand_ins(streams: Streams) -> dict[str, Any]:
    """The streams' part of ``torch.cuda``, by name."""
    Stream.streams = streams

    def set_stream(stream: Stream | None) -> None:
        if stream is not None:
            streams.current = stream

    return {
        "Stream": Stream,
        "Event": Event,
        "StreamContext": StreamContext,
        "stream": lambda stream: StreamContext(stream),
        "current_stream": lambda device=None: streams.current,
        "default_stream": lambda device=None: streams.default,
        "set_stream": set_stream,
        "synchronize": lambda device=None: streams.synchronize(),
        "is_current_stream_capturing": lambda: False,
    }
