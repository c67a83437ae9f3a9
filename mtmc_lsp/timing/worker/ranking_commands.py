"""Ranks many variants of a candidate by a few samples each, in a worker on a GPU."""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from mtmc_lsp.codegen.module.cuda_graph import RUN_CUDA_GRAPH
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.timing.messages import RankAnswer, RankRequest
from mtmc_lsp.timing.worker.clock import Run
from mtmc_lsp.timing.worker.timing_commands import candidate_of, clock_of
from mtmc_lsp.verify.worker.run_target import release_gpu_memory, target_source

ROUNDS = ((3, 100, 1.5), (9, 4, 1.2), (25, 1, 1.0))
"""How often each that is left is run, how many of them go on at most, and how much slower than the best they may be."""
SIDE_BY_SIDE = 16
MEMORY_PART = 0.5
"""The part of a GPU's free memory that first calls may take together."""


def rank(request: RankRequest) -> RankAnswer:
    """Rank many candidates: compile them side by side, then a few cold-L2 samples of each; None for those that fail."""
    capture = request.capture
    own = target_source(request.own, capture)
    deadline = time.monotonic() + request.seconds if request.seconds else float("inf")
    with torch.no_grad():
        loaded = [_loaded(capture, own, source) for source in request.sources]
        # A process captures one graph at a time; each variant knows only of its own.
        replayed = any(RUN_CUDA_GRAPH in source for source in request.sources)
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
