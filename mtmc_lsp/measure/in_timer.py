"""Timing commands, run in a worker on a GPU: a candidate against its baselines, a ranking, the device's ceilings."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from mtmc_lsp.capture.calls import Call, build_call
from mtmc_lsp.core.errors import MeasurementRejected
from mtmc_lsp.core.jsonable import from_json, to_json
from mtmc_lsp.core.results import BaselineTime, Device, Timing
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.measure.inputs import make_inputs, prepared_call
from mtmc_lsp.measure.retesting import Retest
from mtmc_lsp.measure.running import module_of, own_text
from mtmc_lsp.measure.sampling import (
    Run,
    clocks_agree,
    gpu_lock,
    graph_medians,
    interleaved,
    ratio_of,
    sample,
    speed_of,
    warm,
)

TIME_BUDGET_SECONDS = 2.0
SMALL_US = 20.0
"""Calls shorter than this are also timed from a CUDA graph: otherwise launching them is what is timed."""
RANKING_SAMPLES, FINAL_SAMPLES, FINALISTS = 9, 25, 4

_state: dict[str, Any] = {}


def _inputs(capture: Capture, own: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """The user's module and the workload's inputs, made once."""
    if "module" not in _state:
        module = module_of(capture, own, None, False)
        call = build_call(module, capture.workload, "cuda", capture.workload.sizes)
        distribution = "given" if capture.workload.source.value == "get_inputs" else "normal"
        _state["inputs"] = make_inputs(capture, call, capture.graph.sizes, distribution, 0, "cuda", False)
        _state["module"] = module
    return _state["module"], _state["inputs"]


def _bound(call: Call, values: list[Any]) -> Run:
    """The call with its arguments, with as little of ours between as can be."""
    function = call.function
    pairs = list(zip(call.names, values, strict=True))
    positional = [value for name, value in pairs if name not in call.keyword]
    named = {name: value for name, value in pairs if name in call.keyword}
    return lambda: function(*positional, **named)


def _eager(capture: Capture, own: str) -> Run:
    module, inputs = _inputs(capture, own)
    return _bound(*prepared_call(module, capture, inputs, "cuda"))


def _candidate(capture: Capture, own: str, source: str) -> Run:
    return _bound(*prepared_call(module_of(capture, own, source, False), capture, _inputs(capture, own)[1], "cuda"))


def _compiled(capture: Capture, own: str) -> tuple[Run | None, str]:
    """The user's own code under ``torch.compile``, compiled; or None and why not."""
    if "compiled" not in _state:
        module, inputs = _inputs(capture, own)
        call, values = prepared_call(module, capture, inputs, "cuda")
        try:
            run = _bound(replace(call, function=torch.compile(call.function)), values)
            for _ in range(3):
                run()
            torch.cuda.synchronize()
            _state["compiled"] = run, ""
        except Exception as error:
            _state["compiled"] = None, f"torch.compile failed: {type(error).__name__}"
    result: tuple[Run | None, str] = _state["compiled"]
    return result


def baseline(request: dict[str, Any]) -> dict[str, Any]:
    """Compile the user's own code, so that the first timing need not wait for it."""
    capture = from_json(Capture, request["capture"])
    with torch.no_grad():
        _compiled(capture, own_text(request, capture))
    return {}


def time_candidate(request: dict[str, Any]) -> dict[str, Any]:
    """Time a candidate against eager, ``torch.compile`` and the previous version; a :class:`Timing` as JSON."""
    capture = from_json(Capture, request["capture"])
    own = own_text(request, capture)
    with torch.no_grad(), gpu_lock():
        _, inputs = _inputs(capture, own)
        runs = {"candidate": _candidate(capture, own, request["source"]), "eager": _eager(capture, own)}
        # A second set of samples of the same candidate is the A/A control.
        runs["control"] = runs["candidate"]
        compiled, note = _compiled(capture, own)
        if compiled is not None:
            runs["compile"] = compiled
        if request.get("previous"):
            runs["previous"] = _candidate(capture, own, request["previous"])
        retest = Retest(runs["candidate"], runs["eager"], inputs, random=capture.uses_random)
        retest.before()
        timed = {**runs, "candidate": retest.kept}
        samples = interleaved(timed, float(request.get("seconds", TIME_BUDGET_SECONDS)))
        retest.after()
        warm_us, wall_us = warm(runs["candidate"])
        median = statistics.median(device for device, _ in samples["candidate"])
        _must_be_possible(median, warm_us, wall_us, float(request["least_us"]))
        contenders = {name: run for name, run in runs.items() if name != "control"}
        graphs = graph_medians(contenders) if median < SMALL_US else {}
        retest.restore()
    timing = _timing(samples, graphs, note, float(request["bound_us"]))
    data: dict[str, Any] = to_json(replace(timing, warm_us=warm_us))
    return data


def _must_be_possible(median: float, warm_us: float, wall_us: float, least_us: float) -> None:
    if not clocks_agree(warm_us, wall_us):
        raise MeasurementRejected(
            f"the clocks disagree: {warm_us:.0f} us by the device's events, {wall_us:.0f} us by the host; "
            "some of the work is not where it is timed"
        )
    if median < least_us:
        raise MeasurementRejected(
            f"{median:.1f} us is less than the {least_us:.1f} us that the memory needs to bring the inputs: "
            "the measurement cannot be right"
        )


def _timing(
    samples: dict[str, list[tuple[float, float]]], graphs: dict[str, float], note: str, bound_us: float
) -> Timing:
    device_us = {name: [device for device, _ in values] for name, values in samples.items()}
    noise = ratio_of(device_us["control"], device_us["candidate"])
    baselines = []
    for name in ("eager", "compile", "previous"):
        if name in device_us:
            ratio = ratio_of(device_us[name], device_us["candidate"])
            baselines.append(BaselineTime(name, statistics.median(device_us[name]), ratio, "", graphs.get(name)))
    best = min((b for b in baselines if b.name != "previous"), key=lambda b: b.median_us)
    assert best.speedup is not None
    if "compile" not in device_us:
        baselines.append(BaselineTime("compile", 0.0, None, note))
    median = statistics.median(device_us["candidate"])
    return Timing(
        median_us=median,
        baselines=tuple(baselines),
        best=best.name,
        speed=speed_of(best.speedup, noise),
        noise=noise,
        samples=len(device_us["candidate"]),
        method="CUDA events, L2 flushed before each call, contenders interleaved in random order, medians",
        # Small results may still lie in the L2 cache when the clock stops, so the plain bound can be beaten a little.
        roofline=min(1.0, bound_us / median) if median else 0.0,
        host_us=statistics.median(host for _, host in samples["candidate"]),
        graph_us=graphs.get("candidate"),
    )


def quick(request: dict[str, Any]) -> dict[str, Any]:
    """Rank many candidates: compile them side by side, then a few cold-L2 samples of each; None for those that fail."""
    capture = from_json(Capture, request["capture"])
    own = own_text(request, capture)
    limit = request.get("seconds")
    deadline = time.monotonic() + float(limit) if limit else float("inf")
    with torch.no_grad(), gpu_lock():
        _inputs(capture, own)
        loaded = [_loaded(capture, own, source) for source in request["sources"]]
        with ThreadPoolExecutor(16) as pool:
            works = list(pool.map(_first_call, loaded))
        torch.cuda.synchronize()
        runs = [run if works[i] else None for i, run in enumerate(loaded)]
        medians: list[float | None] = []
        for run in runs:
            late = time.monotonic() > deadline
            medians.append(None if run is None or late else _median(run, RANKING_SAMPLES))
        # The best few are told apart by more samples.
        for _, i in sorted((m, i) for i, m in enumerate(medians) if m is not None)[:FINALISTS]:
            chosen = runs[i]
            assert chosen is not None
            medians[i] = _median(chosen, FINAL_SAMPLES)
    return {"medians": medians}


def _loaded(capture: Capture, own: str, source: str) -> Run | None:
    try:
        return _candidate(capture, own, source)
    except Exception:  # a variant that does not import is simply not a choice
        return None


def _first_call(run: Run | None) -> bool:
    if run is None:
        return False
    try:
        # The mode belongs to the thread.
        with torch.no_grad():
            run()
    except Exception:  # a variant that does not fit the device is simply not a choice
        return False
    return True


def _median(run: Run, count: int) -> float:
    return statistics.median(sample(run)[0] for _ in range(count))


def device(request: dict[str, Any]) -> dict[str, Any]:
    """The GPU's measured ceilings as a :class:`Device`."""
    with torch.no_grad(), gpu_lock():
        result = _measured_device()
    data: dict[str, Any] = to_json(result)
    return data


def _measured_device() -> Device:
    properties = torch.cuda.get_device_properties(0)
    copy_us = _copy_us(1 << 30)
    flops: dict[str, float] = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        flops[name] = _product_rate(dtype)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    flops["tf32"] = _product_rate(torch.float32)
    torch.set_float32_matmul_precision(before)
    flops["fp16x3"] = flops["fp16"] / 3
    return Device(
        name=torch.cuda.get_device_name(),
        arch=f"sm_{properties.major}{properties.minor}",
        sm_count=properties.multi_processor_count,
        shared_bytes=int(getattr(properties, "shared_memory_per_block_optin", 101376)),
        l2_bytes=int(properties.L2_cache_size),
        bandwidth=2 * (1 << 30) / (copy_us * 1e-6),
        flops=flops,
        measured=True,
    )


def _copy_us(size: int) -> float:
    source = torch.empty(size, dtype=torch.int8, device="cuda")
    destination = torch.empty_like(source)
    return _best(lambda: destination.copy_(source))


def _product_rate(dtype: torch.dtype) -> float:
    """Operations per second of the library's product."""
    a, b = (torch.randn(4096, 4096, device="cuda", dtype=dtype) for _ in range(2))
    return 2.0 * 4096.0**3 / (_best(lambda: a @ b) * 1e-6)


def _best(run: Callable[[], Any]) -> float:
    """The least of a few cold-L2 samples: what the device can do."""
    run()
    return min(sample(run)[0] for _ in range(5))
