"""What each planner reached on the problems that all planners ended: means with intervals, and curves."""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mtmc_lsp.app.bench.comparison.running import REFERENCE
from mtmc_lsp.app.bench.runner import ran_out_of_memory
from mtmc_lsp.app.bench.summary import ANSWERED, CORRECT, delivered_ratio, kept_timing

SECONDS = (5, 10, 15, 20, 25, 30, 40, 60)
"""Times since the start of a run at which the speedup is reported."""
DRAWS = 2000
"""Samples of problems from which an interval follows."""
NOT_BASELINES = ("eager", "previous")


@dataclass(frozen=True)
class Point:
    """A verified version."""

    candidates: int
    """The number of the candidate that it is."""
    seconds: float
    """When it was known to be right and faster, since the start of the run."""
    speedup: float
    """Over eager mode."""


@dataclass(frozen=True)
class Run:
    """One run of one planner."""

    problem: str
    group: str
    entrant: str
    speedup: float | None
    """Of the file over eager mode after the run: 1 if it stays as it was; None if nothing was timed."""
    points: tuple[Point, ...]
    candidates: int
    seconds: float
    baseline_gain: float | None
    """The best of the other baselines over eager mode, at least 1; None if none was timed."""

    def after(self, candidates: int) -> float:
        """The best verified speedup after a number of candidates."""
        return max([1.0, *(point.speedup for point in self.points if point.candidates <= candidates)])

    def after_seconds(self, seconds: float) -> float:
        """The best verified speedup after a time."""
        return max([1.0, *(point.speedup for point in self.points if point.seconds <= seconds)])


@dataclass(frozen=True)
class Mean:
    """A geometric mean with its 95 % interval by a bootstrap over problems."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Standing:
    """One planner on one group of problems."""

    over_eager: Mean | None
    over_best: Mean | None
    """Over the best baseline of the problem; of the problems where one was timed."""
    over_best_count: int
    relative: Mean | None
    """As a multiple of the reference on the same problems."""
    faster: int
    """Files that got faster."""
    candidates: float
    """Mean number of candidates."""
    seconds: float
    """Mean time of a run."""
    by_candidates: tuple[float, ...] = ()
    """Geometric mean after 0, 1, 2, ... candidates."""
    by_seconds: tuple[float, ...] = ()
    """The same after each time of :data:`SECONDS`."""


@dataclass(frozen=True)
class Group:
    """The planners on the problems of one level or suite; all problems if the name is empty."""

    name: str
    problems: int
    standings: Mapping[str, Standing]


@dataclass(frozen=True)
class ComparisonSummary:
    """All results."""

    groups: tuple[Group, ...]
    left_out: Mapping[str, int]
    """Problems that do not count, by the reason."""
    environments: tuple[str, ...]
    builds: tuple[str, ...]
    marks: tuple[int, ...] = field(default=SECONDS)


def run_of(record: Mapping[str, Any]) -> Run:
    """A line of the file of runs, as far as it counts."""
    speedup = delivered_ratio(record, "eager")
    reported: dict[int, float] = {}
    for seconds, index, status in record.get("progress", ()):
        if status == "accepted":
            reported.setdefault(index, seconds)
    points = []
    for step in record.get("steps", ()):
        ratio = _over_eager(step)
        is_right = bool(step["verdict"]) and step["verdict"]["status"] in CORRECT
        if step["index"] in reported and is_right and ratio is not None and speedup is not None:
            # The last timing of the run decides what was reached.
            points.append(Point(step["index"], reported[step["index"]], min(ratio, speedup)))
    if points and speedup is not None:
        last = max(points, key=lambda point: point.speedup)
        points[points.index(last)] = Point(last.candidates, last.seconds, speedup)
    return Run(
        record["problem"],
        record["level"],
        record["entrant"],
        speedup,
        tuple(points),
        len(record.get("steps", ())),
        float(record["wall_seconds"]),
        _baseline_gain(record),
    )


def summarise_comparison(records: Sequence[Mapping[str, Any]], entrants: Sequence[str]) -> ComparisonSummary:
    """Summarise the problems that all of ``entrants`` ended.

    Args:
        entrants: names; the first is what others are multiples of, unless the usual reference is among them.
    """
    by_problem: dict[str, dict[str, Mapping[str, Any]]] = {}
    for record in records:
        if record["entrant"] in entrants:
            by_problem.setdefault(record["problem"], {})[record["entrant"]] = record
    left_out: Counter[str] = Counter()
    counted: list[dict[str, Run]] = []
    for several in by_problem.values():
        reason = _why_left_out(several, entrants)
        if reason:
            left_out[reason] += 1
        else:
            counted.append({name: run_of(several[name]) for name in entrants})
    reference = REFERENCE if REFERENCE in entrants else entrants[0]
    names = sorted({runs[reference].group for runs in counted})
    groups = [_group("", counted, entrants, reference)]
    if len(names) > 1:
        groups += [
            _group(name, [runs for runs in counted if runs[reference].group == name], entrants, reference)
            for name in names
        ]
    return ComparisonSummary(
        tuple(groups),
        dict(left_out.most_common()),
        tuple(sorted({_environment(record) for record in records if "environment" in record})),
        tuple(sorted({f"mtmc {record['version']}, commit {record['commit'] or 'unknown'}" for record in records})),
    )


def _why_left_out(several: Mapping[str, Mapping[str, Any]], entrants: Sequence[str]) -> str:
    missing = [name for name in entrants if name not in several]
    if missing:
        return "not run with all planners"
    unable = {several[name]["status"] for name in entrants if several[name]["status"] not in ANSWERED}
    if unable:
        everywhere = all(several[name]["status"] in unable for name in entrants)
        return f"{', '.join(sorted(unable))} with {'all' if everywhere else 'some'} planners"
    if any(ran_out_of_memory(several[name]) for name in entrants):
        return "out of memory beside other problems"
    return ""


def _group(name: str, counted: Sequence[Mapping[str, Run]], entrants: Sequence[str], reference: str) -> Group:
    gains = [_gain_of_problem(runs.values()) for runs in counted]
    return Group(
        name,
        len(counted),
        {
            entrant: _standing([runs[entrant] for runs in counted], [runs[reference] for runs in counted], gains)
            for entrant in entrants
        },
    )


def _gain_of_problem(runs: Any) -> float | None:
    """The best baseline over eager mode, the same for all planners: one run may have had no time for ``torch.compile``."""
    known = [run.baseline_gain for run in runs if run.baseline_gain is not None]
    return statistics.median(known) if known else None


def _standing(runs: Sequence[Run], reference: Sequence[Run], gains: Sequence[float | None]) -> Standing:
    timed = [
        (run, other, gain)
        for run, other, gain in zip(runs, reference, gains, strict=True)
        if run.speedup is not None and other.speedup is not None
    ]
    speedups = [run.speedup or 1.0 for run, _, _ in timed]
    over_best = [(run.speedup or 1.0) / gain for run, _, gain in timed if gain is not None]
    most = max((run.candidates for run, _, _ in timed), default=0)
    return Standing(
        _mean(speedups),
        _mean(over_best),
        len(over_best),
        _mean([(run.speedup or 1.0) / (other.speedup or 1.0) for run, other, _ in timed]),
        sum(speedup > 1.0 for speedup in speedups),
        statistics.fmean(run.candidates for run in runs) if runs else 0.0,
        statistics.fmean(run.seconds for run in runs) if runs else 0.0,
        tuple(_geometric([run.after(count) for run, _, _ in timed]) for count in range(most + 1)) if timed else (),
        tuple(_geometric([run.after_seconds(mark) for run, _, _ in timed]) for mark in SECONDS) if timed else (),
    )


def _mean(values: Sequence[float]) -> Mean | None:
    """The same values give the same interval."""
    if not values:
        return None
    draw = random.Random(0)
    logs = [math.log(value) for value in values]
    means = sorted(math.fsum(draw.choices(logs, k=len(logs))) / len(logs) for _ in range(DRAWS))
    low, high = means[round(0.025 * DRAWS)], means[round(0.975 * DRAWS) - 1]
    return Mean(_geometric(values), math.exp(low), math.exp(high))


def _geometric(values: Sequence[float]) -> float:
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def _over_eager(step: Mapping[str, Any]) -> float | None:
    baselines = (step.get("timing") or {}).get("baselines", ())
    ratios = [item["speedup"]["ratio"] for item in baselines if item["name"] == "eager" and item["speedup"]]
    return float(ratios[0]) if ratios else None


def _baseline_gain(record: Mapping[str, Any]) -> float | None:
    timing = kept_timing(record)
    if timing is None:
        return None
    medians = {item["name"]: item["median_us"] for item in timing["baselines"] if item["speedup"] and item["median_us"]}
    others = [median for name, median in medians.items() if name not in NOT_BASELINES]
    return max(1.0, medians["eager"] / min(others)) if others and "eager" in medians else None


def _environment(record: Mapping[str, Any]) -> str:
    known = record["environment"]
    return f"{known['gpu'] or 'no GPU'}, torch {known['torch']}, triton {known['triton']}"
