"""Takes samples of calls and evaluates them. Runs in workers."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from mtmc_lsp.core.results import Ratio, Speed
from mtmc_lsp.timing.worker.clock import Clock, Run

MIN_SAMPLES, MAX_SAMPLES = 25, 200
FEW_SAMPLES = 7
"""Of an edit's calls that exceed the time limit with more samples. Long calls vary little, and other runs wait for the GPU."""
BOOTSTRAPS = 1000
MIN_RELATIVE_DIFFERENCE = 0.01
"""Relative differences below this are never significant: between two processes the same code differs by about this much,
because of memory placement and clock rates."""
SAME_WITHIN = 0.03
MAX_RELATIVE_ERROR, CONVERGENCE_STEP = 0.001, 5
"""Sampling ends when the relative standard error of every median is below the first; checked every few rounds (second)."""
FEWEST_SAMPLES, MAX_LONG_ERROR = 5, 0.003
"""Of calls so long that :data:`MIN_SAMPLES` exceed the time limit, the first is enough if the standard error of every median is
below the second, or if it is clear which version is faster. A trial of a version of 0.14 s used an H200 alone for 14.7 s before
(``fused_linear_cross_entropy_32768``, commit b3fdde48)."""
CLEAR_DIFFERENCE, CLEAR_HOST_DIFFERENCE, CLEAR_ERRORS = 0.1, 0.5, 4.0
"""It is clear which of two medians is smaller if they differ by the first, or the second where the host bounds one of them, and
by this many standard errors more. With ten runs on a host, 25 samples of launches differed by a third from later ones."""
WARM_CALLS, MIN_WARM_CALLS, WARM_BATCHES = 20, 3, 5
WARM_US = 20_000.0
"""Approximate limit in microseconds for a batch of calls."""
GRAPH_SECONDS = 0.2
DEVICE_BOUND = 2.0
"""A call is device-bound if its device time is at least this many times its host time."""
CALLS_IN_BATCH, BATCHES, MIN_DEVICE_BOUND_BATCHES, DEVICE_BOUND_BATCH = 10, 3, 2, 1.5
"""A call is also device-bound if, in two of three batches of ten calls, the device takes 1.5 times as long as launching."""
MAX_BATCHED_US = 5000.0
"""Longer calls are not tested in batches."""
ENOUGH_SAMPLES = {2.0: 5, 20.0: 3}
"""A contender that takes more than its share of the time limit is sampled no more after this many samples, if each of them is
slower than the candidate's median by the factor. A user's loop may take a second, and nothing else uses the GPU meanwhile."""
SINGLE_US, SINGLE_FACTOR = 200_000.0, 10.0
"""One sample of a contender is enough if it takes this long and is slower than the candidate by this factor."""
KNOWN_FACTOR = 20.0
"""Samples of an earlier timing count if all of them are slower than the candidate by this factor."""
SINGLE_ERROR = 0.5
"""The relative error that a single sample is assumed to have."""
LONG_US = 20_000.0
"""Of longer calls, one shows whether the device bounds them: launch overhead varies by much less. A warm batch has one."""
GRAPH_WORTH = 10.0
"""Contenders that are slower than the candidate by more than this are not timed from a CUDA graph: capturing and replaying the
thousands of launches of a loop takes seconds, and no graph saves so much."""
ROW_US, LEAST_CALLS, MOST_CALLS = 1000.0, 5, 50
"""Approximate length of a row of calls in microseconds, and the limits of its calls."""
LEAST_ROWS, MOST_ROWS, ROW_SECONDS = 15, 60, 0.15
HOST_BOUND = 0.8
"""The host bounds a row of calls if launching them takes at least this share of its time."""
HOST_SLACK, MAX_AHEAD_US = 3.0, 1000.0
"""Host delay that is hidden, as a multiple of the median host time. On a busy machine 5 % of the calls were that late."""


def interleaved(
    clock: Clock,
    runs: Mapping[str, Run],
    seconds: float,
    rival: str = "",
    known: Mapping[str, Sequence[tuple[float, float]]] | None = None,
    *,
    is_final: bool = False,
) -> dict[str, list[tuple[float, float]]]:
    """Sample each contender once per round, in random order.

    A contender that is slow and far slower than the candidate takes part in the first rounds only. For device-bound calls, host
    time is excluded: in a program the host runs ahead, and here it would only add noise. For host-bound calls it is included.

    Args:
        seconds: time limit.
        rival: the contender that the candidate has to beat; the sampling ends when it is clear which of them is faster.
        known: samples of contenders in earlier timings. A contender that they show to be far slower is not called again.
        is_final: whether it also ends when it is clear that the candidate is not faster, by however little, and after few samples
            of long calls.
    """
    known = known or {}
    first = {name: clock.cold(run) for name, run in runs.items() if not known.get(name)}
    slow = {n for n, values in known.items() if values and min(values)[0] > KNOWN_FACTOR * first["candidate"][0]}
    first |= {name: clock.cold(run) for name, run in runs.items() if name not in slow and name not in first}
    samples = {name: list(known[name]) if name in slow else [] for name in runs}
    ahead = {name: hidden_host_us(clock, runs[name], sample) for name, sample in first.items()}
    if "control" in ahead:
        # Both are the candidate, so both use the same mode; if they differ, the one that includes host time.
        ahead["candidate"] = ahead["control"] = min(ahead["candidate"], ahead["control"])
    # A separate generator, so that user code cannot predict the order by seeding the global one.
    shuffle = random.Random()
    deadline = time.perf_counter() + seconds
    is_host_bound = bool(rival) and not (ahead["candidate"] and ahead.get(rival))
    difference = CLEAR_HOST_DIFFERENCE if is_host_bound else CLEAR_DIFFERENCE
    share_us = seconds / len(runs) * 1e6
    for name, sample in first.items():
        # A long call whose host time is not hidden, or is a small part of it.
        if sample[0] > share_us and (not ahead[name] or sample[0] >= SINGLE_US):
            samples[name].append(sample)
    order = list(first)
    if "candidate" in runs:
        order = [name for name in order if not is_far_slower(samples[name], [first["candidate"]], share_us)]
    while True:
        shuffle.shuffle(order)
        for name in order:
            samples[name].append(clock.cold(runs[name], ahead[name]))
        count = min(len(samples[name]) for name in order)
        late = time.perf_counter() > deadline
        is_enough = (
            late
            or _has_converged([samples[name] for name in order])
            or (rival and _is_clear(samples["candidate"], samples[rival], difference))
            or (is_final and _is_no_gain(samples["candidate"], samples[rival]))
        )
        is_long = is_final and sum(us for name in order for us, _ in samples[name]) > seconds * 1e6
        if count >= MAX_SAMPLES or (count >= (FEW_SAMPLES if is_long else MIN_SAMPLES) and (is_enough or is_long)):
            return samples
        sampled = [samples[name] for name in order]
        total_us = sum(device for values in sampled for device, _ in values)
        is_over = total_us > max(seconds * 1e6, count * LONG_US)
        if (
            is_over
            and count >= FEWEST_SAMPLES
            and (
                _has_converged(sampled, MAX_LONG_ERROR)
                or (rival and _is_clear(samples["candidate"], samples[rival], difference))
            )
        ):
            return samples
        if "candidate" in runs:
            order = [name for name in order if not is_far_slower(samples[name], samples["candidate"], share_us)]


def is_far_slower(
    samples: Sequence[tuple[float, float]], faster: Sequence[tuple[float, float]], share_us: float
) -> bool:
    """Whether more samples of a slow contender would change no verdict.

    Args:
        samples: device and host microseconds of the contender.
        faster: those of the version that it is compared with.
        share_us: the contender's share of the time limit.
    """
    times = [device for device, _ in samples]
    if not faster or sum(times) <= share_us:
        return False
    median = statistics.median(device for device, _ in faster)
    if min(times) >= SINGLE_US and min(times) > SINGLE_FACTOR * median:
        return True
    return any(min(times) > factor * median and len(times) >= count for factor, count in ENOUGH_SAMPLES.items())


def hidden_host_us(clock: Clock, run: Run, first: tuple[float, float] | None = None) -> float:
    """Microseconds to keep the device busy before a call so that host time is hidden; 0 for host-bound calls.

    Args:
        first: a sample of the call; by default one is taken.
    """
    samples = [clock.cold(run) if first is None else first]
    samples += [clock.cold(run) for _ in range(2 if samples[0][0] < LONG_US else 0)]
    device, host = (statistics.median(sample[i] for sample in samples) for i in (0, 1))
    if device <= DEVICE_BOUND * host:
        # After a synchronisation, a call takes up to four times as much host time as in a batch. In a host-bound batch, host
        # and device take equally long.
        rows = (clock.batch(run, CALLS_IN_BATCH) for _ in range(BATCHES if device < MAX_BATCHED_US else 0))
        if sum(in_row > DEVICE_BOUND_BATCH * launched for in_row, _, launched in rows) < MIN_DEVICE_BOUND_BATCHES:
            return 0.0
    return min(HOST_SLACK * host, MAX_AHEAD_US)


def _has_converged(samples: Sequence[Sequence[tuple[float, float]]], most: float = MAX_RELATIVE_ERROR) -> bool:
    """Whether more samples would not change any median significantly."""
    if len(samples[0]) % CONVERGENCE_STEP:
        return False
    return all(_median_error([device for device, _ in values]) < most for values in samples)


def _is_clear(samples: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]], difference: float) -> bool:
    """Whether two medians differ by far more than their errors."""
    if len(samples) % CONVERGENCE_STEP:
        return False
    a, b = ([device for device, _ in values] for values in (samples, others))
    medians = statistics.median(a), statistics.median(b)
    errors = math.hypot(_median_error(a), _median_error(b))
    return max(medians) > min(medians) * (1.0 + difference + CLEAR_ERRORS * errors)


def _is_no_gain(samples: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> bool:
    """Whether a difference that counts as faster is out of reach."""
    if len(samples) % CONVERGENCE_STEP:
        return False
    a, b = ([device for device, _ in values] for values in (samples, others))
    errors = math.hypot(_median_error(a), _median_error(b))
    return statistics.median(b) * (1.0 + CLEAR_ERRORS * errors) < statistics.median(a) * (1.0 + MIN_RELATIVE_DIFFERENCE)


def _median_error(values: Sequence[float]) -> float:
    """The relative standard error of the median, estimated from the quartiles for normal noise."""
    if len(values) == 1:
        return SINGLE_ERROR
    low, median, high = statistics.quantiles(values, n=4)
    return 1.2533 * (high - low) / 1.349 / math.sqrt(len(values)) / median if median > 0 else 0.0


@dataclass(frozen=True)
class Warm:
    """Times of batches of calls with a warm L2."""

    calls: int
    """Calls per batch."""
    event_us: float
    """Median time of a batch by the device's events."""
    wall_us: float
    """Host time, from the batch with the second smallest ratio of host time to event time."""


def warm(clock: Clock, run: Run, single_us: float) -> Warm:
    """Time batches of calls by two clocks; batches of long calls (``single_us``) are smaller."""
    least = MIN_WARM_CALLS if single_us < LONG_US else 1
    calls = max(least, min(WARM_CALLS, int(WARM_US / max(single_us, 1.0))))
    batches = [clock.batch(run, calls)[:2] for _ in range(WARM_BATCHES)]
    median = statistics.median(event for event, _ in batches)
    # Work that the events miss delays every batch; a busy host delays some or most of them.
    host_to_event_ratio = sorted(wall / event for event, wall in batches)[1]
    return Warm(calls, median, median * host_to_event_ratio)


def in_rows(clock: Clock, runs: Mapping[str, Run], rival: str) -> dict[str, list[tuple[float, float]]]:
    """Sample rows of calls of each contender, interleaved in random order; nothing if the GPU bounds those of the rival.

    A row contains no wait, so what the host does in each call shows unless the GPU takes longer.

    Returns:
        For each contender the device's and the host's microseconds per call, of each row.
    """
    event_us, _, _ = clock.batch(runs[rival], LEAST_CALLS)
    calls = max(LEAST_CALLS, min(MOST_CALLS, int(ROW_US * LEAST_CALLS / max(event_us, 1.0))))
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    # A separate generator, so that user code cannot predict the order by seeding the global one.
    order, shuffle = list(runs), random.Random()
    deadline = time.perf_counter() + ROW_SECONDS
    while True:
        shuffle.shuffle(order)
        for name in order:
            event_us, _, launched_us = clock.batch(runs[name], calls)
            samples[name].append((event_us / calls, launched_us / calls))
        count = len(samples[rival])
        if count == CONVERGENCE_STEP and statistics.median(b / a for a, b in samples[rival] if a) < HOST_BOUND:
            return {}
        is_enough = (
            _is_clear(samples["candidate"], samples[rival], CLEAR_DIFFERENCE)
            or _is_no_gain(samples["candidate"], samples[rival])
            or time.perf_counter() > deadline
        )
        if count >= MOST_ROWS or (count >= LEAST_ROWS and is_enough):
            return samples


def clocks_agree(event_us: float, wall_us: float) -> bool:
    """Whether the device's events cover all work of a batch.

    Work on another stream ends after the events. Both clocks include launch time, so the allowance covers only one
    synchronisation.
    """
    return wall_us <= 1.5 * event_us + 200.0


def graph_medians(clock: Clock, runs: Mapping[str, Run]) -> dict[str, float]:
    """Median device microseconds of each call in a CUDA graph; calls that cannot be captured are omitted."""
    replays = {name: replay for name, run in runs.items() if (replay := clock.captured(run)) is not None}
    if not replays:
        return {}
    samples = interleaved(clock, replays, GRAPH_SECONDS)
    return {name: statistics.median(device for device, _ in values) for name, values in samples.items()}


def ratio_of(slower: Sequence[float], faster: Sequence[float]) -> Ratio:
    """Ratio of the medians, with a 95 % bootstrap interval.

    It is over the rounds that both have (paired samples), or over the samples of each where one has fewer.
    """
    a, b = (torch.tensor(values, dtype=torch.float64) for values in (slower, faster))
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(len(a), (BOOTSTRAPS, len(a)), generator=generator)
    others = picks if len(a) == len(b) else torch.randint(len(b), (BOOTSTRAPS, len(b)), generator=generator)
    ratios = (a[picks].median(dim=1).values / b[others].median(dim=1).values).sort().values
    low, high = ratios[int(0.025 * BOOTSTRAPS)], ratios[int(0.975 * BOOTSTRAPS)]
    return Ratio(float(a.median() / b.median()), float(low), float(high))


def speed_of(ratio: Ratio, noise: Ratio) -> Speed:
    """The speed verdict; a difference must exceed the noise of the A/A control."""
    spread = max(noise.high - 1.0, 1.0 - noise.low, MIN_RELATIVE_DIFFERENCE)
    if ratio.low > 1.0 + MIN_RELATIVE_DIFFERENCE and ratio.ratio > 1.0 + spread:
        return Speed.FASTER
    if ratio.high < 1.0 - MIN_RELATIVE_DIFFERENCE and ratio.ratio < 1.0 - spread:
        return Speed.SLOWER
    if ratio.low > 1.0 - SAME_WITHIN and ratio.high < 1.0 + SAME_WITHIN:
        return Speed.SAME
    return Speed.AMBIGUOUS
