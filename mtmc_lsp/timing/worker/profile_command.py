"""The profiling command: the operators and kernels of a call of the target. Runs in a worker."""

from __future__ import annotations

import collections
import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from mtmc_lsp.capture.worker.calls import build_call
from mtmc_lsp.core.json_codec import from_json
from mtmc_lsp.process.gpu_lock import exclusively
from mtmc_lsp.timing.messages import KernelRow, OperatorRow, ProfileAnswer, ProfileRequest
from mtmc_lsp.timing.worker.training_call import run_of
from mtmc_lsp.verify.worker.inputs import make_inputs, prepared_call, reusing
from mtmc_lsp.verify.worker.run_target import module_of, target_source

WARM_CALLS = 3
MOST_CALLS = 50
CALL = "mtmc: one call"
"""The range around each call; events outside belong to the profiler."""


def profile(request: ProfileRequest) -> ProfileAnswer:
    """Profile calls of the target or of a candidate."""
    run, device = _run_of(request)
    wait = torch.cuda.synchronize if device == "cuda" else _nothing
    for _ in range(WARM_CALLS):
        run()
    wait()
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with exclusively():
        walls = _walls(run, wait, request.seconds / 3)
        calls = max(1, min(MOST_CALLS, int(request.seconds / 3 / (statistics.median(walls) * 1e-6))))
        with torch.profiler.profile(activities=kinds) as profiler:
            for _ in range(calls):
                with torch.profiler.record_function(CALL):
                    run()
                wait()
    events = list(profiler.events())
    kernels = [event for event in events if _is_kernel(event)]
    spans = [(event.time_range.start, event.time_range.end) for event in kernels]
    return ProfileAnswer(
        device=device,
        calls=calls,
        wall_us=statistics.median(walls),
        operators=_operators(events, calls),
        kernels=_kernels(kernels, calls),
        gpu_us=covered(spans) / calls,
        gap_us=gaps(spans, calls) / calls,
    )


def once(path: str) -> None:
    """One call of the target between profiler start and stop, for an external profiler such as ncu."""
    run, _ = _run_of(from_json(ProfileRequest, json.loads(Path(path).read_text(encoding="utf-8"))))
    for _ in range(WARM_CALLS):
        run()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    run()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def _run_of(request: ProfileRequest) -> tuple[Callable[[], Any], str]:
    capture = request.capture
    device = "cuda" if torch.cuda.is_available() and capture.workload.device == "cuda" else "cpu"
    user_source = target_source(request.user_source, capture)
    # The user's file as it is now, including kernels that we inserted; a candidate is loaded separately.
    module = module_of(capture, user_source, request.source)
    sizes = {**capture.workload.sizes, **request.sizes}
    start = build_call(module, capture.workload, device, sizes, values=False, construct=reusing(capture))
    inputs = make_inputs(capture, start, request.sizes, "normal", 0, device)
    call, values = prepared_call(module, capture, inputs, device)

    once = run_of(capture, call, values, inputs)

    def run() -> Any:
        with torch.no_grad():
            return once()

    return run, device


def _nothing() -> None:
    """Wait for the CPU, which is done when a call returns."""


def _walls(run: Callable[[], Any], wait: Callable[[], None], seconds: float) -> list[float]:
    walls: list[float] = []
    deadline = time.perf_counter() + seconds
    while not walls or (len(walls) < MOST_CALLS and time.perf_counter() < deadline):
        began = time.perf_counter()
        run()
        wait()
        walls.append((time.perf_counter() - began) * 1e6)
    return walls


def _is_kernel(event: Any) -> bool:
    """Whether the event is a kernel on the device, not one of our ranges."""
    return event.device_type == torch.autograd.DeviceType.CUDA and event.name != CALL and not event.is_user_annotation


def _operators(events: Iterable[Any], calls: int) -> tuple[OperatorRow, ...]:
    """Operators that the target calls directly, by name, including their children."""
    totals: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0, 0.0])
    for event in events:
        if event.cpu_parent is not None and event.cpu_parent.name == CALL:
            total = totals[event.name]
            total[0] += 1
            total[1] += event.cpu_time_total
            total[2] += _launched(event)
    return tuple(
        OperatorRow(name, count / calls, cpu / calls, gpu / calls) for name, (count, cpu, gpu) in totals.items()
    )


def _launched(event: Any) -> float:
    """The time of the kernels that an operator and its children launched."""
    launched = sum(kernel.duration for kernel in event.kernels)
    return float(launched + sum(_launched(child) for child in event.cpu_children))


def _kernels(kernels: Iterable[Any], calls: int) -> tuple[KernelRow, ...]:
    totals: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
    for event in kernels:
        totals[event.name][0] += 1
        totals[event.name][1] += event.time_range.end - event.time_range.start
    return tuple(KernelRow(name, count / calls, us / calls) for name, (count, us) in totals.items())


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """The total time covered by at least one span."""
    total, end = 0.0, float("-inf")
    for begin, stop in sorted(spans):
        total += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return total


def gaps(spans: Sequence[tuple[float, float]], calls: int) -> float:
    """The total time between spans, without the ``calls - 1`` longest pauses, which separate calls."""
    pauses: list[float] = []
    end: float | None = None
    for begin, stop in sorted(spans):
        if end is not None and begin > end:
            pauses.append(begin - end)
        end = stop if end is None else max(end, stop)
    return sum(sorted(pauses)[: max(0, len(pauses) - (calls - 1))])
