"""Ranking of many variants and the device's ceilings, run in a worker on a GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from mtmc_lsp.codegen.module.cuda_graph import REPLAYED
from mtmc_lsp.core.results import Device
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.timing.messages import DeviceRequest, RankAnswer, RankRequest
from mtmc_lsp.timing.worker.clock import Run
from mtmc_lsp.timing.worker.timing_commands import candidate_of, clock_of
from mtmc_lsp.verify.worker.run_target import own_text, release_gpu_memory

ROUNDS = ((3, 100, 1.5), (9, 4, 1.2), (25, 1, 1.0))
"""How often each that is left is run, how many of them go on at most, and how much slower than the best they may be."""
SIDE_BY_SIDE = 16
COPIED = 1 << 30
"""Bytes of the copy that gives the memory's rate."""
LATER, LATER_SECONDS = 3, 0.3
"""How often it is copied again, and after how long each time."""
MEMORY_PART = 0.5
"""The part of a GPU's free memory that first calls may take together."""


def rank(request: RankRequest) -> RankAnswer:
    """Rank many candidates: compile them side by side, then a few cold-L2 samples of each; None for those that fail."""
    capture = request.capture
    own = own_text(request.own, capture)
    deadline = time.monotonic() + request.seconds if request.seconds else float("inf")
    with torch.no_grad():
        loaded = [_loaded(capture, own, source) for source in request.sources]
        # A process captures one graph at a time; each variant knows only of its own.
        replayed = any(REPLAYED in source for source in request.sources)
        with ThreadPoolExecutor(1 if replayed else _side_by_side(capture)) as pool:
            works = list(pool.map(_first_call, loaded))
        torch.cuda.synchronize()
        runs = [run if works[i] else None for i, run in enumerate(loaded)]
        medians: list[float | None] = [None] * len(runs)
        left = [i for i, run in enumerate(runs) if run is not None]
        # Successive halving: the few that may be the best are told apart by more samples.
        for count, most, within in ROUNDS:
            for i in left:
                chosen = runs[i]
                if chosen is not None and time.monotonic() < deadline:
                    medians[i] = _median(chosen, count)
            timed = sorted((median, i) for i in left if (median := medians[i]) is not None)
            left = [i for median, i in timed[:most] if median <= within * timed[0][0]]
    release_gpu_memory()
    return RankAnswer(tuple(medians))


def _side_by_side(capture: Capture) -> int:
    """How many variants are compiled at once: each is run to be compiled, and its results take memory."""
    if not torch.cuda.is_available():
        return SIDE_BY_SIDE
    return max(1, min(SIDE_BY_SIDE, int(MEMORY_PART * torch.cuda.mem_get_info()[0] // max(1, capture.bytes))))


def _loaded(capture: Capture, own: str, source: str) -> Run | None:
    try:
        return candidate_of(capture, own, source)
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
    return statistics.median(clock_of().cold(run)[0] for _ in range(count))


def measure_device(request: DeviceRequest) -> Device:
    """Measure the ceilings of the GPU."""
    with torch.no_grad():
        result = _measured_device()
    release_gpu_memory()
    return result


def _measured_device() -> Device:
    properties = torch.cuda.get_device_properties(0)
    copy_us = _copy_us(COPIED)
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
        bandwidth=2 * COPIED / (copy_us * 1e-6),
        flops=flops,
        measured=True,
        # Two transfers a clock, which is in kHz; the width is in bits. Older versions of torch know neither.
        peak_bandwidth=2e3
        * getattr(properties, "memory_clock_rate", 0)
        * getattr(properties, "memory_bus_width", 0)
        / 8,
    )


def _copy_us(size: int) -> float:
    source = torch.empty(size, dtype=torch.int8, device="cuda")
    destination = torch.empty_like(source)
    found = _best(lambda: destination.copy_(source))
    for _ in range(LATER):
        # The user's own code may just be run elsewhere, for its graph, and every timing is judged by this rate.
        time.sleep(LATER_SECONDS)
        found = min(found, _best(lambda: destination.copy_(source)))
    return found


def _product_rate(dtype: torch.dtype) -> float:
    """Operations per second of the library's product."""
    a, b = (torch.randn(4096, 4096, device="cuda", dtype=dtype) for _ in range(2))
    return 2.0 * 4096.0**3 / (_best(lambda: a @ b) * 1e-6)


def _best(run: Callable[[], Any]) -> float:
    """The least of a few cold-L2 samples: what the device can do."""
    run()
    return min(clock_of().cold(run)[0] for _ in range(5))
