"""One candidate against its baselines on one clock, with all that makes the times believable. Runs in workers."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from mtmc_lsp.core.dtypes import EPSILON
from mtmc_lsp.core.errors import MeasurementRejected
from mtmc_lsp.core.results import BaselineTime, Timing
from mtmc_lsp.timing.worker.clock import Clock, Run
from mtmc_lsp.timing.worker.sampling import Warm, clocks_agree, graph_medians, interleaved, ratio_of, speed_of, warm
from mtmc_lsp.timing.worker.timing_integrity import Retest

SMALL_US = 20.0
"""Calls shorter than this are also timed from a CUDA graph: otherwise launching them is what is timed."""
HOST_SHARE = 0.8
"""So are those whose launches take the host this part of their time, or more."""
BASELINES = ("eager", "compile", "max-autotune", "reduce-overhead", "previous")


@dataclass(frozen=True)
class Compiled:
    """The user's own code under ``torch.compile``: made by us, before anything is timed."""

    run: Run | None
    note: str = ""
    """Why it could not be compiled."""
    seconds: float = 0.0


@dataclass(frozen=True)
class Contest:
    """Who is timed, on what."""

    candidate: Run
    eager: Run
    inputs: Mapping[str, torch.Tensor]
    """The tensors that all of them read."""
    compiled: Mapping[str, Compiled] = field(default_factory=dict)
    previous: Run | None = None
    moved: Callable[[], Sequence[tuple[str, torch.Tensor]]] = tuple
    """Those of them that a call has moved to memory of its own: see :func:`~mtmc_lsp.verify.worker.inputs.moved`."""
    random: bool = False
    """Whether results are random."""
    tolerance: float = 0.0
    """How far two right results may be apart through what they are rounded to on the way: see :func:`rounded_within`."""
    epsilon: float = EPSILON["float32"]
    """How coarsely they are: see :func:`coarsest_epsilon`."""
    bound_us: float = 0.0
    """The roofline's time."""
    least_us: float = 0.0
    """A time below this cannot be true."""


def hold(contest: Contest, clock: Clock, seconds: float) -> Timing:
    """Time all contenders.

    Raises:
        MeasurementRejected: the timing cannot be true.
    """
    runs = {"candidate": contest.candidate, "eager": contest.eager}
    # A second set of samples of the same candidate is the A/A control.
    runs["control"] = contest.candidate
    runs |= {name: made.run for name, made in contest.compiled.items() if made.run is not None}
    if contest.previous is not None:
        runs["previous"] = contest.previous
    threads = set(threading.enumerate())
    retest = Retest(
        contest.candidate,
        contest.eager,
        contest.inputs,
        moved=contest.moved,
        random=contest.random,
        tolerance=contest.tolerance,
        epsilon=contest.epsilon,
    )
    retest.before()
    samples = interleaved(clock, {**runs, "candidate": retest.kept}, seconds)
    retest.after()
    median = statistics.median(device for device, _ in samples["candidate"])
    batch = warm(clock, contest.candidate, median)
    must_be_possible(median, batch, contest.least_us)
    contenders = {name: run for name, run in runs.items() if name != "control"}
    host = statistics.median(host for _, host in samples["candidate"])
    is_launched = median < SMALL_US or host > HOST_SHARE * median
    graphs = graph_medians(clock, contenders) if is_launched else {}
    retest.restore()
    if not clock.untouched():
        raise MeasurementRejected("the clocks were replaced while the candidate was timed")
    left = [thread.name for thread in threading.enumerate() if thread not in threads]
    if left:
        raise MeasurementRejected(f"threads that it started still run after the candidate returned: {', '.join(left)}")
    timing = conclude(samples, graphs, contest)
    method = f"{clock.method}, contenders interleaved in random order, medians"
    return replace(timing, warm_us=batch.event_us / batch.calls, method=method)


def must_be_possible(median: float, batch: Warm, least_us: float) -> None:
    """Refuse what cannot be true.

    Args:
        median: of single calls, with a cold L2.
        batch: calls back to back, by the device's events and by the host.
        least_us: the least that a single call can take.

    Raises:
        MeasurementRejected: clocks disagree, or it is faster than the memory.
    """
    if not clocks_agree(batch.event_us, batch.wall_us):
        raise MeasurementRejected(
            f"the clocks disagree on {batch.calls} calls: {batch.event_us:.0f} us by the device's events, "
            f"{batch.wall_us:.0f} us by the host; some of the work is not where it is timed"
        )
    if median < least_us:
        raise MeasurementRejected(
            f"{median:.1f} us is less than the {least_us:.1f} us that the memory needs to bring the inputs: "
            "the measurement cannot be right"
        )


def conclude(samples: Mapping[str, list[tuple[float, float]]], graphs: Mapping[str, float], contest: Contest) -> Timing:
    """What the samples say, against every baseline."""
    device_us = {name: [device for device, _ in values] for name, values in samples.items()}
    noise = ratio_of(device_us["control"], device_us["candidate"])
    baselines = []
    for name in BASELINES:
        made = contest.compiled.get(name)
        if name in device_us:
            ratio = ratio_of(device_us[name], device_us["candidate"])
            median = statistics.median(device_us[name])
            seconds = round(made.seconds, 3) if made is not None else None
            baselines.append(BaselineTime(name, median, ratio, "", graphs.get(name), seconds))
        elif made is not None:
            baselines.append(BaselineTime(name, 0.0, None, made.note))
    best = min((b for b in baselines if b.name != "previous" and b.speedup), key=lambda b: b.median_us)
    assert best.speedup is not None
    median = statistics.median(device_us["candidate"])
    return Timing(
        median_us=median,
        baselines=tuple(baselines),
        best=best.name,
        speed=speed_of(best.speedup, noise),
        noise=noise,
        samples=len(device_us["candidate"]),
        method="",
        # Small results may still lie in the L2 cache when the clock stops, so the plain bound can be beaten a little.
        roofline=min(1.0, contest.bound_us / median) if median else 0.0,
        host_us=statistics.median(host for _, host in samples["candidate"]),
        graph_us=graphs.get("candidate"),
    )
