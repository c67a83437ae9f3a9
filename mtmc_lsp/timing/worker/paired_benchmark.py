"""Times one candidate against its baselines on one clock, with checks of plausibility. Runs in workers."""

from __future__ import annotations

import contextlib
import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mtmc_lsp.core.dtypes import EPSILON
from mtmc_lsp.core.errors import MeasurementRejected
from mtmc_lsp.core.results import BaselineTime, Timing
from mtmc_lsp.timing.worker.clock import Clock, Run
from mtmc_lsp.timing.worker.sampling import (
    GRAPH_WORTH,
    Warm,
    clocks_agree,
    graph_medians,
    interleaved,
    ratio_of,
    speed_of,
    warm,
)
from mtmc_lsp.timing.worker.slow_original import Original
from mtmc_lsp.timing.worker.timing_integrity import Retest

SMALL_US = 20.0
"""Shorter calls are also timed from a CUDA graph, because launch overhead would dominate."""
HOST_SHARE = 0.8
"""So are calls whose launches on the host take at least this fraction of their time."""
BASELINES = ("eager", "compile", "max-autotune", "reduce-overhead", "previous")


@dataclass(frozen=True)
class Compiled:
    """The user's code under ``torch.compile``, compiled before anything is timed."""

    run: Run | None
    note: str = ""
    """Why it could not be compiled."""
    seconds: float = 0.0


@dataclass(frozen=True)
class Contenders:
    """The code to time, its inputs and the limits of a plausible result."""

    candidate: Run
    eager: Run
    inputs: Mapping[str, torch.Tensor]
    """The tensors that all contenders read."""
    compiled: Mapping[str, Compiled] = field(default_factory=dict)
    previous: Run | None = None
    original: Original = field(default_factory=Original)
    """What earlier timings measured of ``eager``; this one adds to it."""
    relocated: Callable[[], Sequence[tuple[str, torch.Tensor]]] = tuple
    """Inputs that a call moved to other memory: see :func:`~mtmc_lsp.verify.worker.inputs.moved`."""
    random: bool = False
    """Whether results are random."""
    tolerance: float = 0.0
    """Allowed distance of two correct results due to rounding of intermediate values: see :func:`rounded_within`."""
    epsilon: float = EPSILON["float32"]
    """Machine epsilon of this rounding: see :func:`coarsest_epsilon`."""
    bound_us: float = 0.0
    """The roofline's lower bound in microseconds."""
    least_us: float = 0.0
    """A shorter time, in microseconds, is a measurement error."""
    ends_when_clear: bool = False
    """Whether to end when it is clear if the candidate is faster than the previous version, or else than eager mode."""


def run_paired_benchmark(
    setup: Contenders,
    clock: Clock,
    seconds: float,
    gpu: contextlib.AbstractContextManager[None] | None = None,
) -> Timing:
    """Time all contenders.

    Args:
        seconds: time for the samples of single calls.
        gpu: entered while samples are taken: nothing else may use the GPU then.

    Raises:
        MeasurementRejected: the timing is not plausible.
    """
    runs = {"candidate": setup.candidate, "eager": setup.eager}
    # A second set of samples of the same candidate is the A/A control.
    runs["control"] = setup.candidate
    runs |= {name: baseline.run for name, baseline in setup.compiled.items() if baseline.run is not None}
    if setup.previous is not None:
        runs["previous"] = setup.previous
    threads = set(threading.enumerate())

    def measured_eager() -> Any:
        # The user's code may be a loop that takes a second, so no further call measures its memory.
        result, setup.original.peak_bytes = clock.peak_bytes(setup.eager)
        return result

    retest = Retest(
        setup.candidate,
        measured_eager,
        setup.inputs,
        original=setup.original,
        relocated=setup.relocated,
        random=setup.random,
        tolerance=setup.tolerance,
        epsilon=setup.epsilon,
    )
    rival = ("previous" if setup.previous is not None else "eager") if setup.ends_when_clear else ""
    contenders = {name: run for name, run in runs.items() if name != "control"}
    retest.before()
    with gpu or contextlib.nullcontext():
        known = {"eager": setup.original.samples}
        samples = interleaved(clock, {**runs, "candidate": retest.call}, seconds, rival, known)
        median, host = (statistics.median(sample[i] for sample in samples["candidate"]) for i in (0, 1))
        batch = warm(clock, setup.candidate, median)
        is_launched = median < SMALL_US or host > HOST_SHARE * median
        medians = {name: statistics.median(device for device, _ in samples[name]) for name in contenders}
        short = {name: run for name, run in contenders.items() if medians[name] <= GRAPH_WORTH * median}
        graphs = graph_medians(clock, short) if is_launched else {}
    setup.original.samples = samples["eager"] if retest.knows_original else []
    peaks = {"eager": setup.original.peak_bytes}
    peaks |= {name: clock.peak_bytes(run)[1] for name, run in contenders.items() if name != "eager"}
    retest.after()
    check_plausible(median, batch, setup.least_us)
    if not clock.untouched():
        raise MeasurementRejected("the clocks were replaced while the candidate was timed")
    running_threads = [thread.name for thread in threading.enumerate() if thread not in threads]
    if running_threads:
        raise MeasurementRejected(
            f"threads that it started still run after the candidate returned: {', '.join(running_threads)}"
        )
    timing = summarise(samples, graphs, setup, peaks)
    method = f"{clock.method}, contenders interleaved in random order, medians"
    return replace(timing, warm_us=batch.event_us / batch.calls, method=method)


def check_plausible(median: float, batch: Warm, least_us: float) -> None:
    """Reject implausible measurements.

    Args:
        median: microseconds of single calls with a cold L2.
        batch: calls back to back, timed by the device's events and by the host.
        least_us: the minimum time of a single call.

    Raises:
        MeasurementRejected: the clocks disagree, or the time is below the minimum.
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


def summarise(
    samples: Mapping[str, list[tuple[float, float]]],
    graphs: Mapping[str, float],
    setup: Contenders,
    peaks: Mapping[str, int | None],
) -> Timing:
    """The timing of the candidate against every baseline, from the samples.

    Args:
        peaks: the most device memory that a call of each contender allocates.
    """
    device_us = {name: [device for device, _ in values] for name, values in samples.items()}
    noise = ratio_of(device_us["control"], device_us["candidate"])
    baselines = []
    for name in BASELINES:
        compiled = setup.compiled.get(name)
        if name in device_us:
            ratio = ratio_of(device_us[name], device_us["candidate"])
            median = statistics.median(device_us[name])
            seconds = round(compiled.seconds, 3) if compiled is not None else None
            speed = speed_of(ratio, noise)
            graph_us, peak = graphs.get(name), peaks.get(name)
            baselines.append(BaselineTime(name, median, ratio, speed, "", graph_us, seconds, peak))
        elif compiled is not None:
            baselines.append(BaselineTime(name, 0.0, None, note=compiled.note))
    best = min((b for b in baselines if b.name != "previous" and b.speedup), key=lambda b: b.median_us)
    median = statistics.median(device_us["candidate"])
    return Timing(
        median_us=median,
        baselines=tuple(baselines),
        best=best.name,
        noise=noise,
        samples=len(device_us["candidate"]),
        method="",
        # Small results may still be in the L2 cache when the clock stops, so a time can be slightly below the bound.
        roofline=min(1.0, setup.bound_us / median) if median else 0.0,
        host_us=statistics.median(host for _, host in samples["candidate"]),
        graph_us=graphs.get("candidate"),
        peak_bytes=peaks.get("candidate"),
    )
