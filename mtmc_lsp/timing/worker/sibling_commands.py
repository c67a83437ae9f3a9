"""Compares several versions with the version that they change, in one lock period. Runs in a worker on a GPU."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence

import torch

from mtmc_lsp.core.errors import ResultsDiffer
from mtmc_lsp.core.results import Ratio, Timing
from mtmc_lsp.process.gpu_lock import USING_ALONE, WAITING_ALONE, exclusively, lock_seconds
from mtmc_lsp.process.worker.failures import classify
from mtmc_lsp.timing.messages import SiblingsAnswer, SiblingsRequest, SiblingTime
from mtmc_lsp.timing.worker.clock import Clock, Run
from mtmc_lsp.timing.worker.paired_benchmark import HOST_SHARE, SMALL_US
from mtmc_lsp.timing.worker.sampling import hidden_host_us, is_far_slower, ratio_of
from mtmc_lsp.timing.worker.timing_commands import (
    Version,
    clock_of,
    eager_version,
    inputs_of,
    restored_inputs,
    version_of,
)
from mtmc_lsp.timing.worker.timing_integrity import Retest, coarsest_epsilon, error_text, rounded_within
from mtmc_lsp.verify.worker.inputs import relocated
from mtmc_lsp.verify.worker.run_target import release_gpu_memory, target_source

FIRST_ROUNDS, SECOND_ROUNDS, ALL_ROUNDS = 3, 9, 25
"""Samples of every version; of those that are not far slower; of those whose time is wanted."""
FAR_SLOWER = 2.0
"""Ratio to the time of the version before from which on the first samples are enough."""
NEAR_BEST = 1.3
"""Ratio to the fastest version of a group up to which a version is sampled further."""
BEST_OF_GROUP = 3
"""Versions of a group that get all samples."""
SECONDS_OF_VERSION = 0.4
"""Time of samples for each version, after which no further round begins."""
GRAPH_SAMPLES = 9
"""Samples of a short call in a CUDA graph."""
STANDARD_ERRORS = 3.92
"""Standard errors in a 95 % interval."""
BEFORE = -1
"""The number of the version before among the samples."""

Samples = dict[int, list[tuple[float, float]]]
"""Device and host microseconds by the number of a version."""


def time_siblings(request: SiblingsRequest) -> SiblingsAnswer:
    """Load and compare all versions, then take samples in rounds while nothing else uses the GPU."""
    capture = request.capture
    user_source = target_source(request.user_source, capture)
    with torch.no_grad(), restored_inputs(capture, user_source):
        eager = eager_version(capture, user_source)
        before = version_of(capture, user_source, request.previous) if request.previous is not None else eager
        runs: dict[int, Run] = {}
        failures: dict[int, SiblingTime] = {}
        for number, source in enumerate(request.sources):
            try:
                version = version_of(capture, user_source, source)
                runs[number] = _compared(request, user_source, version, eager)
            except Exception as error:  # generated code may raise anything
                kind = classify(error)
                if kind.is_gpu_failure:
                    raise
                text = "the results differ from those of the user's code"
                failures[number] = SiblingTime(text if isinstance(error, ResultsDiffer) else error_text(error), kind)
        began = dict(lock_seconds)
        with exclusively():
            clock = clock_of()
            samples = take_samples(clock, {BEFORE: before[0].bound(before[1]), **runs}, request.groups)
            graphs = {n: us for n, run in runs.items() if (us := _graph_us(clock, run, samples[n])) is not None}
    release_gpu_memory()
    times = [failures.get(n) or _time(request, samples, n, graphs.get(n)) for n in range(len(request.sources))]
    waited, used = (lock_seconds[key] - began.get(key, 0.0) for key in (WAITING_ALONE, USING_ALONE))
    return SiblingsAnswer(tuple(times), waited, used)


def _compared(request: SiblingsRequest, user_source: str, version: Version, eager: Version) -> Run:
    """The call of a version, after its results were compared with those of the user's code.

    Raises:
        ResultsDiffer: they differ.
        CandidateRaised: the version raises.
    """
    capture = request.capture
    inputs = inputs_of(capture, user_source)[1]
    run = version[0].bound(version[1])
    retest = Retest(
        run,
        eager[0].bound(eager[1]),
        inputs,
        relocated=lambda: [i for call, _ in (version, eager) for i in relocated(call.instance, capture, inputs)],
        random=capture.uses_random,
        tolerance=rounded_within(capture.graph),
        epsilon=coarsest_epsilon(capture.graph),
    )
    try:
        retest.before()
    finally:
        retest.restore()
    return run


def take_samples(clock: Clock, runs: Mapping[int, Run], groups: Sequence[int]) -> Samples:
    """Sample all versions in rounds, each round in another order. Rounds that all versions share are paired samples.

    Args:
        runs: the calls by number; the version before is :data:`BEFORE`.
        groups: the number of each version's group.
    """
    share_us = SECONDS_OF_VERSION * 1e6
    samples: Samples = {number: [] for number in runs}
    hidden = {number: hidden_host_us(clock, run) for number, run in runs.items()}
    deadline = time.perf_counter() + SECONDS_OF_VERSION * len(runs)
    # A separate generator, so that user code cannot predict the order by seeding the global one.
    shuffle = random.Random()
    wanted = [number for number in runs if number != BEFORE]
    for rounds, most in ((FIRST_ROUNDS, len(runs)), (SECOND_ROUNDS, len(runs)), (ALL_ROUNDS, BEST_OF_GROUP)):
        if samples[BEFORE]:
            wanted = _worth_sampling(samples, wanted, groups, most)
        while wanted and len(samples[wanted[0]]) < rounds:
            if samples[BEFORE] and time.perf_counter() > deadline:
                return samples
            # User code that is slow, for example a loop of launches, takes part in the first rounds only.
            is_settled = len(samples[BEFORE]) >= FIRST_ROUNDS and all(
                is_far_slower(samples[BEFORE], samples[number], share_us) for number in wanted
            )
            order = wanted.copy() if is_settled else [BEFORE, *wanted]
            shuffle.shuffle(order)
            for number in order:
                samples[number].append(clock.cold(runs[number], hidden[number]))
    return samples


def _worth_sampling(samples: Samples, numbers: Iterable[int], groups: Sequence[int], most: int) -> list[int]:
    """The versions that are not far slower than the version before, and of each group the fastest ones."""
    medians = {number: _median(samples[number]) for number in (BEFORE, *numbers)}
    members: dict[int, list[int]] = {}
    for number in sorted(numbers, key=lambda number: medians[number]):
        members.setdefault(groups[number], []).append(number)
    worth: list[int] = []
    for group in members.values():
        near = [n for n in group[:most] if medians[n] <= NEAR_BEST * medians[group[0]]]
        worth += [n for n in near if medians[n] <= FAR_SLOWER * medians[BEFORE]]
    return sorted(worth)


def _median(samples: Sequence[tuple[float, float]]) -> float:
    return statistics.median(device for device, _ in samples)


def _graph_us(clock: Clock, run: Run, samples: Sequence[tuple[float, float]]) -> float | None:
    """The time of a short call in a CUDA graph; None if the call is long, was not sampled often, or cannot be captured."""
    host = statistics.median(host for _, host in samples)
    if len(samples) < ALL_ROUNDS or (_median(samples) >= SMALL_US and host <= HOST_SHARE * _median(samples)):
        return None
    replay = clock.captured(run)
    return None if replay is None else _median([clock.cold(replay) for _ in range(GRAPH_SAMPLES)])


def _time(request: SiblingsRequest, samples: Samples, number: int, graph_us: float | None) -> SiblingTime:
    """How a version compares with the version before, by the rounds that have both."""
    after = samples[number]
    before = samples[BEFORE][: len(after)]
    median = _median(after)
    if median < request.least_us:
        return SiblingTime(f"{median:.1f} us is less than the {request.least_us:.1f} us that the memory needs")
    ratio = ratio_of([device for device, _ in before], [device for device, _ in after])
    timing = Timing(
        median,
        baselines=(),
        best="",
        noise=Ratio(1.0, 1.0, 1.0),
        samples=len(after),
        method="paired samples of sibling versions",
        roofline=min(1.0, request.bound_us / median) if median else 0.0,
        host_us=statistics.median(host for _, host in after),
        graph_us=graph_us,
    )
    error = (ratio.high - ratio.low) / STANDARD_ERRORS
    return SiblingTime("", None, _median(before), median, ratio.ratio, error, timing)
