"""Timing on a GPU, run in a worker: paired and interleaved samples, cold L2, and the device's measured ceilings."""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from mtmc_lsp.capture.calls import build_call
from mtmc_lsp.capture.loading import load_user_module
from mtmc_lsp.core.jsonable import from_json, to_json
from mtmc_lsp.core.results import BaselineTime, Device, Ratio, Speed, Timing
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.measure.inputs import make_inputs, prepared_call

MIN_SAMPLES, MAX_SAMPLES = 25, 200
BOOTSTRAPS = 1000
FLUSH_BYTES = 256 << 20
"""More than twice the L2 of any GPU of today; writing it also takes longer than launching most kernels."""

_state: dict[str, Any] = {}


def _inputs(capture: Capture) -> tuple[Any, dict[str, torch.Tensor]]:
    """The user's module and the workload's inputs, made once."""
    if "module" not in _state:
        module = load_user_module(capture.workload.target.path)
        call = build_call(module, capture.workload, "cuda", capture.workload.sizes)
        _state["module"] = module
        distribution = "given" if capture.workload.source.value == "get_inputs" else "normal"
        _state["inputs"] = make_inputs(capture, call, capture.graph.sizes, distribution, 0, "cuda", False)
    return _state["module"], _state["inputs"]


def _callable(module: Any, capture: Capture, inputs: dict[str, torch.Tensor]) -> Callable[[], Any]:
    call, values = prepared_call(module, capture, inputs, "cuda")
    return lambda: call.run(values)


def _candidate(capture: Capture, source: str) -> Callable[[], Any]:
    cache = _state.setdefault("candidates", {})
    if source not in cache:
        name = f"{capture.module_name}__timed{len(cache)}"
        cache[source] = load_user_module(capture.workload.target.path, source, name)
    return _callable(cache[source], capture, _inputs(capture)[1])


def _compiled(capture: Capture) -> tuple[Callable[[], Any] | None, str]:
    """The user's own code under ``torch.compile``, compiled; or None and why not."""
    if "compiled" not in _state:
        module, inputs = _inputs(capture)
        call, values = prepared_call(module, capture, inputs, "cuda")
        try:
            function = torch.compile(call.function)
            compiled = replace(call, function=function)

            def run() -> Any:
                return compiled.run(values)

            with torch.no_grad():
                for _ in range(3):
                    run()
            torch.cuda.synchronize()
            _state["compiled"] = run, ""
        except Exception as error:
            _state["compiled"] = None, f"torch.compile failed: {type(error).__name__}"
    result: tuple[Callable[[], Any] | None, str] = _state["compiled"]
    return result


@contextlib.contextmanager
def _gpu_lock() -> Iterator[None]:
    """Only one process of ours measures on this GPU at a time."""
    import fcntl
    import tempfile

    path = Path(tempfile.gettempdir()) / f"mtmc-gpu-{torch.cuda.current_device()}.lock"
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _sample(run: Callable[[], Any], flush: torch.Tensor) -> tuple[float, float]:
    """Microseconds of one call: on the device with a cold L2, and on the host until it returned."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    flush.zero_()
    start.record()
    began = time.perf_counter()
    run()
    host = time.perf_counter() - began
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e3, host * 1e6


def _measure(runs: dict[str, Callable[[], Any]], seconds: float) -> dict[str, list[tuple[float, float]]]:
    """Rounds of one sample of each contender, in random order."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for name, run in runs.items():
        for _ in range(3):
            _sample(run, flush)
    order = list(runs)
    deadline = time.perf_counter() + seconds
    while True:
        random.shuffle(order)
        for name in order:
            samples[name].append(_sample(runs[name], flush))
        count = len(samples[order[0]])
        if count >= MAX_SAMPLES or (count >= MIN_SAMPLES and time.perf_counter() > deadline):
            return samples


def _ratio(slower: list[float], faster: list[float]) -> Ratio:
    """Median over median, with a bootstrap 95 % interval over rounds (pairs stay together)."""
    a, b = torch.tensor(slower, dtype=torch.float64), torch.tensor(faster, dtype=torch.float64)
    picks = torch.randint(len(a), (BOOTSTRAPS, len(a)))
    ratios = (a[picks].median(dim=1).values / b[picks].median(dim=1).values).sort().values
    return Ratio(
        float(a.median() / b.median()), float(ratios[int(0.025 * BOOTSTRAPS)]), float(ratios[int(0.975 * BOOTSTRAPS)])
    )


def _speed(ratio: Ratio, noise: Ratio) -> Speed:
    """A verdict that the A/A control cannot explain."""
    spread = max(noise.high - 1.0, 1.0 - noise.low, 0.002)
    if ratio.low > 1.0 and ratio.ratio > 1.0 + spread:
        return Speed.FASTER
    if ratio.high < 1.0 and ratio.ratio < 1.0 - spread:
        return Speed.SLOWER
    if ratio.low > 0.97 and ratio.high < 1.03:
        return Speed.SAME
    return Speed.AMBIGUOUS


def time_candidate(request: dict[str, Any]) -> dict[str, Any]:
    """Time a candidate against eager, ``torch.compile`` and the previous version; a :class:`Timing` as JSON."""
    capture = from_json(Capture, request["capture"])
    with torch.no_grad(), _gpu_lock():
        module, inputs = _inputs(capture)
        runs = {"candidate": _candidate(capture, request["source"]), "eager": _callable(module, capture, inputs)}
        # A second set of samples of the same candidate is the A/A control.
        runs["control"] = runs["candidate"]
        compiled, note = _compiled(capture)
        if compiled is not None:
            runs["compile"] = compiled
        if request.get("previous"):
            runs["previous"] = _candidate(capture, request["previous"])
        samples = _measure(runs, float(request.get("seconds", 2.0)))
        warm = _warm(runs["candidate"])
    device_us = {name: [d for d, _ in values] for name, values in samples.items()}
    noise = _ratio(device_us["control"], device_us["candidate"])
    baselines = []
    for name in ("eager", "compile", "previous"):
        if name in device_us:
            ratio = _ratio(device_us[name], device_us["candidate"])
            baselines.append(BaselineTime(name, statistics.median(device_us[name]), ratio))
    if compiled is None:
        baselines.append(BaselineTime("compile", float("inf"), None, note))
    best = min((b for b in baselines if b.name != "previous"), key=lambda b: b.median_us)
    assert best.speedup is not None
    median = statistics.median(device_us["candidate"])
    bound = float(request["bound_us"])
    timing = Timing(
        median_us=median,
        baselines=tuple(BaselineTime(b.name, b.median_us if b.speedup else 0.0, b.speedup, b.note) for b in baselines),
        best=best.name,
        speed=_speed(best.speedup, noise),
        noise=noise,
        samples=len(device_us["candidate"]),
        method="CUDA events, L2 flushed before each call, contenders interleaved in random order, medians",
        roofline=bound / median if median else 0.0,
        warm_us=warm,
        host_us=statistics.median(h for _, h in samples["candidate"]),
    )
    data: dict[str, Any] = to_json(timing)
    return data


def _warm(run: Callable[[], Any]) -> float:
    """Median device microseconds of back-to-back calls."""
    times = []
    for _ in range(20):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(float(start.elapsed_time(end)) * 1e3)
    return statistics.median(times)


def quick(request: dict[str, Any]) -> dict[str, Any]:
    """Rank many candidates: compile them side by side, then a few cold-L2 samples of each; None for those that fail."""
    capture = from_json(Capture, request["capture"])
    runs: list[Callable[[], Any] | None] = []
    with torch.no_grad(), _gpu_lock():
        _inputs(capture)
        loaded: list[Callable[[], Any]] = [_candidate(capture, source) for source in request["sources"]]

        def first_call(run: Callable[[], Any]) -> bool:
            try:
                with torch.no_grad():
                    run()
            except Exception:  # a variant that does not fit the device is simply not a choice
                return False
            return True

        with ThreadPoolExecutor(16) as pool:
            works = list(pool.map(first_call, loaded))
        torch.cuda.synchronize()
        runs = [run if ok else None for run, ok in zip(loaded, works, strict=True)]
        flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
        medians: list[float | None] = []
        for run in runs:
            medians.append(statistics.median(_sample(run, flush)[0] for _ in range(9)) if run else None)
        finalists = sorted((m, i) for i, m in enumerate(medians) if m is not None)[:4]
        for _, i in finalists:
            chosen = runs[i]
            assert chosen is not None
            medians[i] = statistics.median(_sample(chosen, flush)[0] for _ in range(25))
    return {"medians": medians}


def device(request: dict[str, Any]) -> dict[str, Any]:
    """The GPU's measured ceilings as a :class:`Device`."""
    properties = torch.cuda.get_device_properties(0)
    big = torch.empty(1 << 30, dtype=torch.int8, device="cuda")
    other = torch.empty_like(big)
    copy_us = min(_cold(lambda: other.copy_(big)) for _ in range(5))
    del big, other
    flops: dict[str, float] = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        a, b = (torch.randn(4096, 4096, device="cuda", dtype=dtype) for _ in range(2))
        flops[name] = _product_rate(a, b)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    a, b = (torch.randn(4096, 4096, device="cuda") for _ in range(2))
    flops["tf32"] = _product_rate(a, b)
    torch.set_float32_matmul_precision(before)
    flops["fp16x3"] = flops["fp16"] / 3
    result = Device(
        name=torch.cuda.get_device_name(),
        arch=f"sm_{properties.major}{properties.minor}",
        sm_count=properties.multi_processor_count,
        shared_bytes=int(getattr(properties, "shared_memory_per_block_optin", 101376)),
        l2_bytes=int(properties.L2_cache_size),
        bandwidth=2 * (1 << 30) / (copy_us * 1e-6),
        flops=flops,
        measured=True,
    )
    data: dict[str, Any] = to_json(result)
    return data


def _product_rate(a: torch.Tensor, b: torch.Tensor) -> float:
    """Operations per second of the library's product."""
    return 2.0 * float(a.shape[0]) ** 3 / (min(_cold(lambda: a @ b) for _ in range(5)) * 1e-6)


def _cold(run: Callable[[], Any]) -> float:
    if "flush" not in _state:
        _state["flush"] = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    run()
    return _sample(run, _state["flush"])[0]
