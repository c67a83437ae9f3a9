"""Ranks many variants of a candidate by a few samples each. Runs in a worker on a GPU."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from mtmc_lsp.codegen.module.cuda_graph import RUN_CUDA_GRAPH
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.process.gpu_lock import USING_ALONE, WAITING_ALONE, exclusively, let_timings_pass, lock_seconds
from mtmc_lsp.process.protocol import NoAnswer
from mtmc_lsp.process.worker.kernel_compilation import compiling_unshared
from mtmc_lsp.timing.messages import PrepareRequest, RankAnswer, RankRequest
from mtmc_lsp.timing.worker.clock import Run
from mtmc_lsp.timing.worker.timing_commands import (
    Version,
    bound_version,
    candidate_of,
    clock_of,
    is_prepared,
    keep_prepared,
    restored_inputs,
    version_of,
)
from mtmc_lsp.verify.worker.run_target import release_gpu_memory, target_source

ROUNDS = ((3, 100, 1.5), (9, 4, 1.2), (25, 1, 1.0))
"""Per round: samples per variant, most variants that advance, and their largest time relative to the best."""
SIDE_BY_SIDE = 16
MEMORY_PART = 0.5
"""Fraction of the GPU's free memory that concurrent first calls may use."""


def prepare(request: PrepareRequest) -> NoAnswer:
    """Load versions and call them concurrently."""
    capture = request.capture
    user_source = target_source(request.user_source, capture)
    versions: dict[str, Version] = {}
    with torch.no_grad(), restored_inputs(capture, user_source):
        for source in dict.fromkeys(request.sources):
            # A version that does not load fails again, with its reason, when it is timed.
            with contextlib.suppress(Exception):
                versions[source] = version_of(capture, user_source, source)
            let_timings_pass()
        runs = {source: bound_version(capture, version) for source, version in versions.items()}
        succeeded = dict(zip(runs, _first_calls(capture, list(runs.values()), request.sources), strict=True))
    keep_prepared({source: version for source, version in versions.items() if succeeded[source]})
    return NoAnswer()


def rank(request: RankRequest) -> RankAnswer:
    """Take a few cold-L2 samples of each variant; None for variants that fail. Those that are not prepared are compiled first."""
    capture = request.capture
    user_source = target_source(request.user_source, capture)
    deadline = time.monotonic() + request.seconds if request.seconds else float("inf")
    with torch.no_grad(), restored_inputs(capture, user_source):
        prepared = [is_prepared(source) for source in request.sources]
        runs = [_loaded(capture, user_source, source) for source in request.sources]
        unprepared = [i for i, is_ready in enumerate(prepared) if not is_ready]
        for i, succeeds in zip(
            unprepared, _first_calls(capture, [runs[i] for i in unprepared], request.sources), strict=True
        ):
            runs[i] = runs[i] if succeeds else None
        before = dict(lock_seconds)
        with exclusively():
            medians = _medians(runs, deadline)
    release_gpu_memory()
    waited, used = (lock_seconds[key] - before.get(key, 0.0) for key in (WAITING_ALONE, USING_ALONE))
    return RankAnswer(tuple(medians), waited, used)


def _medians(runs: Sequence[Run | None], deadline: float) -> list[float | None]:
    medians: list[float | None] = [None] * len(runs)
    remaining = [i for i, run in enumerate(runs) if run is not None]
    # Successive halving: the best variants get more samples.
    for count, max_variants, max_ratio in ROUNDS:
        for i in remaining:
            variant = runs[i]
            if variant is not None and time.monotonic() < deadline:
                medians[i] = statistics.median(clock_of().cold(variant)[0] for _ in range(count))
        timed = sorted((median, i) for i in remaining if (median := medians[i]) is not None)
        remaining = [i for median, i in timed[:max_variants] if median <= max_ratio * timed[0][0]]
    return medians


def _first_calls(capture: Capture, runs: Sequence[Run | None], sources: Sequence[str]) -> list[bool]:
    """Call versions concurrently, which compiles their kernels; returns which of them succeed."""
    # A process can capture only one graph at a time, and variants do not coordinate.
    replayed = any(RUN_CUDA_GRAPH in source for source in sources)
    threads = 1 if replayed else min(len(runs), _side_by_side(capture))
    if threads <= 1:
        with compiling_unshared():
            succeeded = [_first_call(run) for run in runs]
    else:
        with ThreadPoolExecutor(threads) as pool:
            succeeded = list(pool.map(_first_call, runs))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return succeeded


def _side_by_side(capture: Capture) -> int:
    """Number of variants to compile concurrently: compiling runs each variant, and its results need memory."""
    if not torch.cuda.is_available():
        return SIDE_BY_SIDE
    return max(1, min(SIDE_BY_SIDE, int(MEMORY_PART * torch.cuda.mem_get_info()[0] // max(1, capture.bytes))))


def _loaded(capture: Capture, user_source: str, source: str) -> Run | None:
    try:
        return candidate_of(capture, user_source, source)
    except Exception:  # a variant that does not import is simply not a choice
        return None


def _first_call(run: Run | None) -> bool:
    if run is None:
        return False
    try:
        # The gradient mode is thread-local.
        with torch.no_grad():
            run()
    except Exception:  # a variant that does not fit the device is simply not a choice
        return False
    return True
