"""Without a GPU: launches on another stream than the caller's must be ordered, and results must not depend on the current stream."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pairs import HONEST, REFERENCE, changed

from mtmc_lsp.core.results import CheckStatus, Verdict, VerdictStatus
from mtmc_lsp.verify.source_scan import scan
from mtmc_lsp.verify.worker.surroundings.stand_in_streams import (
    LEFT_CURRENT,
    UNORDERED_AFTER,
    UNORDERED_BEFORE,
    Streams,
    stand_ins,
)

Judge = Callable[..., Verdict]
LAUNCH = "        kernel[(inp.shape[0],)]"
SIDE = "torch.cuda.default_stream()"
BEFORE, AFTER = "side.wait_stream(caller)", "caller.wait_stream(side)"


def launched_on(side: str, before: str, after: str) -> str:
    """The honest kernel, launched on a stream, with statements before and after the launch."""
    call = HONEST.partition(LAUNCH)[2].partition("\n")[0]
    honest = f"{LAUNCH}{call}\n"
    lines = [
        f"side, caller = {side}, torch.cuda.current_stream()", before, "with torch.cuda.stream(side):", f"    {honest.strip()}", after,
    ]  # fmt: skip
    return changed(HONEST, (honest, "".join(f"        {line}\n" for line in lines)))


WRONG = {
    "no synchronisation": (SIDE, "pass", "pass", UNORDERED_BEFORE),
    "only before": (SIDE, BEFORE, "pass", UNORDERED_AFTER),
    "only after": (SIDE, "pass", AFTER, UNORDERED_BEFORE),
    "the wrong way round": (SIDE, AFTER, BEFORE, UNORDERED_BEFORE),
    "an event that is recorded too early": (
        SIDE, f"{BEFORE}; done = torch.cuda.Event(); done.record(side)", "caller.wait_event(done)", UNORDERED_AFTER),
    "an event that nobody waits for": (SIDE, BEFORE, "side.record_event()", UNORDERED_AFTER),
    "it stays current": (SIDE, f"{BEFORE}; torch.cuda.set_stream(side)", AFTER, LEFT_CURRENT),
    "a new stream": ("type(torch.cuda.current_stream())()", BEFORE, "pass", UNORDERED_AFTER),
}  # fmt: skip
RIGHT = {
    "streams that wait": (SIDE, BEFORE, AFTER),
    "a new stream that waits": ("type(torch.cuda.current_stream())()", BEFORE, AFTER),
    "events": (
        SIDE, "begin = torch.cuda.Event(); begin.record(); side.wait_event(begin)", "caller.wait_event(side.record_event())"),
    "the program waits": (SIDE, "caller.synchronize()", "side.synchronize()"),
    "the program waits for all work": (SIDE, BEFORE, "out.record_stream(caller); torch.cuda.synchronize()"),
    "the caller's stream": ("torch.cuda.current_stream()", "pass", "pass"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_launches_that_nothing_orders_are_refused(what: str, judge: Judge) -> None:
    *lines, reason = WRONG[what]
    verdict = judge(REFERENCE, "rms", launched_on(*lines), "fast")
    assert verdict.status is VerdictStatus.INCORRECT, verdict
    assert f"order of streams: {reason}" in verdict.reason


@pytest.mark.parametrize("what", RIGHT)
def test_launches_that_are_ordered_are_certified(what: str, judge: Judge) -> None:
    verdict = judge(REFERENCE, "rms", launched_on(*RIGHT[what]), "fast")
    assert verdict.is_correct, verdict.reason
    assert any(check.name == "order of streams" for check in verdict.checks)


@pytest.mark.parametrize("order", ["==", "!="])
def test_results_that_depend_on_the_current_stream_are_refused(order: str, judge: Judge) -> None:
    condition = f"torch.cuda.current_stream() {order} torch.cuda.default_stream()"
    text = changed(HONEST, ("    return out\n", f"    if {condition}:\n        out = out * 1.5\n    return out\n"))
    verdict = judge(REFERENCE, "rms", text, "fast")
    assert verdict.status is VerdictStatus.INCORRECT, verdict


def test_clocks_pass_from_stream_to_stream() -> None:
    streams = Streams()
    names = stand_ins(streams)
    first, second = names["Stream"](), names["Stream"]()

    def launch_on_second(*waits: Callable[[], None]) -> str:
        for wait in waits:
            wait()
        with second:
            streams.launch()
        return streams.unordered

    def chain() -> None:
        caller = streams.current
        first.wait_stream(caller)
        launch_on_second(lambda: second.wait_stream(first))
        first.wait_stream(second)
        caller.wait_stream(first)

    for _ in range(4):
        streams.call(chain)
    assert not streams.unordered
    streams.call(lambda: launch_on_second())
    assert streams.unordered == UNORDERED_BEFORE


@pytest.mark.parametrize("value", ["0", "side", "torch.cuda.default_stream().cuda_stream", "obj.get()"])
def test_compiled_kernels_are_launched_on_the_current_stream(value: str) -> None:
    """No kernel is compiled without a GPU, so only the text shows this."""

    def violations(text: str) -> list[str]:
        return [check.detail for check in scan(text, "fast.py") if check.status is CheckStatus.FAILED]

    launch = "def fast(x):\n    {}\n    compiled[(1, 1, 1)](x, stream={})\n    return x\n"
    assert violations(launch.format("side = other()", value)) == [
        f"launches on {value}, which is no current stream (fast.py:3)"
    ]
    for stream in ("driver.active.get_current_stream(0)", "torch.cuda.current_stream().cuda_stream"):
        assert not violations(launch.format(f"stream = {stream}", "stream"))
        assert not violations(launch.format("pass", stream))
