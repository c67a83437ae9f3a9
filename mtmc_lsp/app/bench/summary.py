"""The summary of results of ``mtmc bench``: how many are correct, how many are faster, by how much, and what did not run."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtmc_lsp.core.errors import Location, RequestError

BASELINES = ("eager", "compile", "best")
ANSWERED = ("improved", "no_gain", "incorrect", "unmeasured")
"""The statuses of runs that ended by themselves."""
CORRECT = ("correct", "correct_at_reduced_sizes")
"""The statuses of verdicts that found no error."""
MORE_MEMORY, BLOCK_BYTES = 1.02, 512
"""The ratio of peaks from which a file needs more memory, and the least amount that torch's allocator counts."""
MEASURED = ("improved", "no_gain", "incorrect")
"""The statuses of runs on a GPU."""


@dataclass(frozen=True)
class Means:
    """Speedups over one baseline."""

    baseline: str
    count: int
    """The number of problems where both were timed; the means are over these."""
    geometric: float | None
    arithmetic: float | None
    fast_1: float
    """The fraction of *all* problems with a verified version that is faster than the baseline."""
    fast_2: float
    """The same for more than twice as fast."""


@dataclass(frozen=True)
class Score:
    """The results of one level, or of all."""

    level: str
    """Empty for all levels together."""
    problems: int
    """All problems of the level, with or without a result."""
    statuses: Mapping[str, int]
    """How many problems ended with each status: ``improved``, ``no_gain``, ``incorrect``, ``unmeasured``, ``refused``,
    ``not_able``, ``timeout``, ``crashed``; ``not_run`` counts those without a result."""
    answered: int
    """The number of problems whose run ended by itself, with or without a gain."""
    correct: int
    """The number of problems with at least one version whose results agreed with those of the user's code."""
    faster: int
    """The number of files that got faster: a version was delivered, so it is faster than the baseline that decides."""
    delivered: tuple[Means, ...]
    """Speedups of the delivered files over each baseline. A file that stays as it was has 1.0 over eager mode."""
    means: tuple[Means, ...]
    """Speedups of the last verified versions, delivered or not."""
    speeds: Mapping[str, int]
    """How many last accepted versions are FASTER, SAME, SLOWER or AMBIGUOUS compared with the best baseline."""
    median_seconds: float
    """The median wall time of a problem."""
    memory: float | None = None
    """Geometric mean of the delivered files' peak memory relative to eager mode's; a file that stays as it was has 1.0."""
    more_memory: int = 0
    """Delivered files whose peak is above eager mode's by more than :data:`MORE_MEMORY`."""


@dataclass(frozen=True)
class Unsolved:
    """Problems without an accepted version, for the same reason."""

    status: str
    reason: str
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Summary:
    """The summary of all results."""

    environments: tuple[str, ...]
    """The machines and versions of the results; with more than one, the means mix machines."""
    builds: tuple[str, ...]
    """The versions and commits of this tool that made the results."""
    scores: tuple[Score, ...]
    """All levels together, then each level."""
    unsolved: tuple[Unsolved, ...]
    """The most frequent reason first."""
    torch_calls: Mapping[str, int]
    """Operations that versions still run as torch calls, and on how many problems."""
    untimed: Mapping[str, int]
    """Why ``torch.compile`` and other baselines have no time, and for how many problems."""
    not_run: tuple[str, ...]


def summarise(records: Sequence[Mapping[str, Any]], requested: Sequence[tuple[str, str]] = ()) -> Summary:
    """Summarise results.

    Args:
        asked: names and levels of the problems that should have a result.
    """
    done = {record["problem"] for record in records}
    not_run = tuple(name for name, _ in requested if name not in done)
    levels = sorted({record["level"] for record in records} | {level for _, level in requested})
    missing = Counter(level for name, level in requested if name not in done)
    scores = [_score("", records, len(not_run))]
    if len(levels) > 1:
        scores += [_score(level, [r for r in records if r["level"] == level], missing[level]) for level in levels]
    calls = Counter(op for record in records for op in set(record.get("torch_calls", ())))
    return Summary(
        tuple(sorted({_environment(r["environment"]) for r in records if "environment" in r})),
        builds_of(records),
        tuple(scores),
        _unsolved(records),
        dict(calls.most_common()),
        dict(Counter(note for record in records for note in _untimed(record)).most_common()),
        not_run,
    )


def builds_of(records: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The versions and commits of this tool that made the results."""
    return tuple(sorted({_build(record) for record in records}))


def check_one_build(records: Sequence[Mapping[str, Any]], path: str) -> None:
    """Refuse to mix commits in one table.

    Raises:
        RequestError: the results come from more than one version or commit of this tool.
    """
    builds = builds_of(records)
    if len(builds) > 1:
        raise RequestError(
            f"these results come from {len(builds)} builds of mtmc: {'; '.join(builds)}",
            where=Location(path),
            remedy="Run the problems again at one commit, or add --mixed to summarise them together.",
        )


def _build(record: Mapping[str, Any]) -> str:
    if "version" not in record:
        return "mtmc of an unknown version"
    return f"mtmc {record['version']}, commit {record['commit'] or 'unknown'}"


def _environment(environment: Mapping[str, str]) -> str:
    device = environment["gpu"] or "no GPU"
    driver = f", driver {environment['driver']}" if environment["driver"] else ""
    return f"{device}{driver}, torch {environment['torch']}, triton {environment['triton']}"


def _score(level: str, records: Sequence[Mapping[str, Any]], missing: int) -> Score:
    count = len(records) + missing
    statuses = Counter(record["status"] for record in records)
    if missing:
        statuses["not_run"] = missing
    speeds = Counter(speed for record in records if (speed := _speed(record)))
    peaks = [ratio for record in records if (ratio := _peak_ratio(record)) is not None]
    return Score(
        level,
        count,
        dict(statuses.most_common()),
        sum(record["status"] in ANSWERED for record in records),
        sum(_is_correct(record) for record in records),
        sum(record["status"] == "improved" for record in records),
        tuple(_means(name, [delivered_ratio(record, name) for record in records], count) for name in BASELINES),
        tuple(_means(name, [_speedup(record, name) for record in records], count) for name in BASELINES),
        dict(speeds.most_common()),
        statistics.median(record["wall_seconds"] for record in records) if records else 0.0,
        statistics.geometric_mean(peaks) if peaks else None,
        sum(ratio > MORE_MEMORY for ratio in peaks),
    )


def _is_correct(record: Mapping[str, Any]) -> bool:
    """Whether a version was verified, or gave the right results while it was timed and was too slow to be verified."""
    return any(
        step["verdict"]["status"] in CORRECT if step["verdict"] else step["status"] == "rejected" and step["timing"]
        for step in record.get("steps", ())
    )


def kept_timing(record: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The timing of the last accepted version."""
    timings = [step["timing"] for step in record.get("steps", ()) if step["status"] == "accepted" and step["timing"]]
    timing: Mapping[str, Any] | None = timings[-1] if timings else None
    return timing


def _speed(record: Mapping[str, Any]) -> str:
    timing = kept_timing(record)
    best = _baseline(timing, "best") if timing is not None else None
    # Results of earlier versions have no speed for each baseline.
    return best.get("speed") or "" if best is not None else ""


def _baseline(timing: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """A baseline that was timed; None if it could not run."""
    name = timing["best"] if name == "best" else name
    return next((b for b in timing["baselines"] if b["name"] == name and b["speedup"]), None)


def _speedup(record: Mapping[str, Any], baseline: str) -> float | None:
    """The speedup of a problem over a baseline; None without a time.

    Without an accepted version, the user's code stays as it is, so it is as fast as eager.
    """
    timing = kept_timing(record)
    if timing is None:
        return 1.0 if baseline == "eager" and record["status"] in MEASURED else None
    timed = _baseline(timing, baseline)
    return timed["speedup"]["ratio"] if timed is not None else None


def delivered_ratio(record: Mapping[str, Any], baseline: str) -> float | None:
    """How many times as fast as a baseline the user's file is after the run; None where that is not known.

    A file that stays as it was runs in eager mode. Its ratio over another baseline follows from the times of both.
    """
    if record["status"] not in MEASURED:
        return 1.0 if baseline == "eager" and record["status"] != "unmeasured" else None
    if record["status"] == "improved" or baseline == "eager":
        return _speedup(record, baseline) if record["status"] == "improved" else 1.0
    timing = kept_timing(record)
    eager, other = (_baseline(timing, name) if timing is not None else None for name in ("eager", baseline))
    return other["median_us"] / eager["median_us"] if eager is not None and other is not None else None


def _peak_ratio(record: Mapping[str, Any]) -> float | None:
    """The peak memory of a call of the user's file after the run, relative to eager mode's; None where that is not known."""
    if record["status"] != "improved":
        return 1.0 if record["status"] in MEASURED else None
    timing = kept_timing(record)
    eager = _baseline(timing, "eager") if timing is not None else None
    if timing is None or eager is None or timing.get("peak_bytes") is None or eager.get("peak_bytes") is None:
        return None
    ours, theirs = (max(peak, BLOCK_BYTES) for peak in (timing["peak_bytes"], eager["peak_bytes"]))
    return float(ours / theirs)


def _untimed(record: Mapping[str, Any]) -> list[str]:
    return [_general(b["note"]) for b in record.get("baselines", ()) if not b["speedup"] and b["note"]]


def _means(baseline: str, known: Sequence[float | None], count: int) -> Means:
    ratios = [ratio for ratio in known if ratio is not None]
    fast = [sum(ratio > limit for ratio in ratios) / count if count else 0.0 for limit in (1.0, 2.0)]
    geometric = math.exp(statistics.fmean(map(math.log, ratios))) if ratios else None
    return Means(baseline, len(ratios), geometric, statistics.fmean(ratios) if ratios else None, *fast)


def _unsolved(records: Sequence[Mapping[str, Any]]) -> tuple[Unsolved, ...]:
    groups: dict[tuple[str, str], list[str]] = {}
    for record in records:
        reason = why_nothing(record)
        if reason:
            groups.setdefault((record["status"], _general(reason)), []).append(record["problem"])
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    return tuple(Unsolved(status, reason, tuple(names)) for (status, reason), names in ordered)


def why_nothing(record: Mapping[str, Any]) -> str:
    """Why no version was accepted; empty if one was."""
    if "error" in record:
        message: str = record["error"]["message"]
        return message
    steps = record["steps"]
    if any(step["status"] == "accepted" for step in steps):
        return ""
    if steps:
        reason: str = steps[-1]["reason"]
        return reason
    calls = sorted(set(record.get("torch_calls", ())))
    return f"no action is worth trying; operations: {', '.join(calls)}" if calls else "there is nothing to compute"


def _general(reason: str) -> str:
    """The reason without what differs between problems: numbers, lines and the names of modules."""
    text = re.sub(r"\bModel(\.\w+)*", "the model", reason.strip().splitlines()[0])
    text = re.sub(r"\(on [^)]*\)", "", text)
    text = re.sub(r"\blines? \d+( to \d+)?", "some lines", text)
    return re.sub(r"\d+(\.\d+)?(e-?\d+)?", "N", text).strip()
