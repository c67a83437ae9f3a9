"""Samples of calls and what may be concluded from them. Runs in workers."""

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
BOOTSTRAPS = 1000
FLOOR = 0.01
"""Differences below this part are never called real, however small the spread: from one start of a process to the next, the
same code differs by about this much, through where its memory lies and how the clocks stand."""
SAME_WITHIN = 0.03
SETTLED, SETTLING_STEP = 0.001, 5
"""Sampling ends once the standard error of every median is below this part of it, which is looked at after so many rounds."""
WARM_CALLS, LEAST_WARM_CALLS, WARM_BATCHES = 20, 3, 5
WARM_US = 20_000.0
"""About what a batch of calls may take."""
GRAPH_SECONDS = 0.2
DEVICE_BOUND = 2.0
"""A call whose time on the device is this many times the host's to launch it is bound by the device."""
CALLS_IN_ROW, ROWS, ROWS_KEPT, KEEPS_UP = 10, 3, 2, 1.5
"""And so is one of which the host launches this many in a row, in two of three tries, while the device takes so much longer."""
LONGEST_IN_ROW_US = 5000.0
"""Calls above this are not tried in rows."""
HOST_SLACK, MOST_AHEAD_US = 3.0, 1000.0
"""How late, as a multiple of its usual time, a host may be without being timed: seen on a busy machine at 5 % of a call."""


def interleaved(clock: Clock, runs: Mapping[str, Run], seconds: float) -> dict[str, list[tuple[float, float]]]:
    """Rounds of one sample of each contender, in random order within a round.

    Of calls whose time is the device's, the host's is kept out altogether: in a program it runs ahead, and here it would only
    add its noise. Calls that the host has to launch piece by piece while the device waits are timed as they come.
    """
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    ahead = {name: _ahead(clock, run) for name, run in runs.items()}
    if "control" in ahead:
        # The candidate twice: it is timed in one way, in the stricter one where it was seen in two.
        ahead["candidate"] = ahead["control"] = min(ahead["candidate"], ahead["control"])
    order = list(runs)
    # A generator of its own: what user code does to the shared one does not make the order foreseeable.
    shuffle = random.Random()
    deadline = time.perf_counter() + seconds
    while True:
        shuffle.shuffle(order)
        for name in order:
            samples[name].append(clock.cold(runs[name], ahead[name]))
        count = len(samples[order[0]])
        late = time.perf_counter() > deadline
        if count >= MAX_SAMPLES or (count >= MIN_SAMPLES and (late or _is_settled(samples))):
            return samples


def _ahead(clock: Clock, run: Run) -> float:
    """Microseconds that the device is to be busy before a call, so that the host is not timed; 0 where its time counts."""
    samples = [clock.cold(run) for _ in range(3)]
    device, host = (statistics.median(sample[i] for sample in samples) for i in (0, 1))
    if device <= DEVICE_BOUND * host:
        # A call after a wait takes the host up to four times as long as one in a row, and the device waits for it. Within a
        # row that the host holds up, both take the same time, however slow it is.
        rows = (clock.batch(run, CALLS_IN_ROW) for _ in range(ROWS if device < LONGEST_IN_ROW_US else 0))
        if sum(in_row > KEEPS_UP * launched for in_row, _, launched in rows) < ROWS_KEPT:
            return 0.0
    return min(HOST_SLACK * host, MOST_AHEAD_US)


def _is_settled(samples: Mapping[str, Sequence[tuple[float, float]]]) -> bool:
    """Whether more samples would move no median by anything that counts."""
    if len(next(iter(samples.values()))) % SETTLING_STEP:
        return False
    return all(_median_error([device for device, _ in values]) < SETTLED for values in samples.values())


def _median_error(values: Sequence[float]) -> float:
    """The standard error of the median, as a part of it, from the quartiles; for normal noise."""
    low, middle, high = statistics.quantiles(values, n=4)
    return 1.2533 * (high - low) / 1.349 / math.sqrt(len(values)) / middle if middle > 0 else 0.0


@dataclass(frozen=True)
class Warm:
    """What batches of calls with a warm L2 take."""

    calls: int
    """In a batch."""
    event_us: float
    """By the device's events, of all of them; the median."""
    wall_us: float
    """By the host, of the batch in which it stands out second least against the events."""


def warm(clock: Clock, run: Run, single_us: float) -> Warm:
    """Time batches of calls by two clocks; of calls that take long (``single_us``) fewer are enough."""
    calls = max(LEAST_WARM_CALLS, min(WARM_CALLS, int(WARM_US / max(single_us, 1.0))))
    batches = [clock.batch(run, calls)[:2] for _ in range(WARM_BATCHES)]
    middle = statistics.median(event for event, _ in batches)
    # Work beside what the events see is in every batch; a host that something else kept busy is late in some, or in most.
    beyond = sorted(wall / event for event, wall in batches)[1]
    return Warm(calls, middle, middle * beyond)


def clocks_agree(event_us: float, wall_us: float) -> bool:
    """Whether the device's events saw all the work of a batch that the host had to wait for.

    Work on another stream ends after the events. The time that the host takes to launch is in both clocks, so only one
    synchronisation is allowed for.
    """
    return wall_us <= 1.5 * event_us + 200.0


def graph_medians(clock: Clock, runs: Mapping[str, Run]) -> dict[str, float]:
    """Median device microseconds of each contender replayed from a CUDA graph; what cannot be captured is left out."""
    replays = {name: replay for name, run in runs.items() if (replay := clock.captured(run)) is not None}
    if not replays:
        return {}
    samples = interleaved(clock, replays, GRAPH_SECONDS)
    return {name: statistics.median(device for device, _ in values) for name, values in samples.items()}


def ratio_of(slower: Sequence[float], faster: Sequence[float]) -> Ratio:
    """Median over median, with a bootstrap 95 % interval over rounds (pairs stay together)."""
    a, b = torch.tensor(slower, dtype=torch.float64), torch.tensor(faster, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(len(a), (BOOTSTRAPS, len(a)), generator=generator)
    ratios = (a[picks].median(dim=1).values / b[picks].median(dim=1).values).sort().values
    low, high = ratios[int(0.025 * BOOTSTRAPS)], ratios[int(0.975 * BOOTSTRAPS)]
    return Ratio(float(a.median() / b.median()), float(low), float(high))


def speed_of(ratio: Ratio, noise: Ratio) -> Speed:
    """A verdict that the A/A control cannot explain."""
    spread = max(noise.high - 1.0, 1.0 - noise.low, FLOOR)
    if ratio.low > 1.0 + FLOOR and ratio.ratio > 1.0 + spread:
        return Speed.FASTER
    if ratio.high < 1.0 - FLOOR and ratio.ratio < 1.0 - spread:
        return Speed.SLOWER
    if ratio.low > 1.0 - SAME_WITHIN and ratio.high < 1.0 + SAME_WITHIN:
        return Speed.SAME
    return Speed.AMBIGUOUS
