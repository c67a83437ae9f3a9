"""What the results of ``mtmc bench`` come to: how many are correct, how many faster, by how much, and what was not run."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BASELINES = ("eager", "compile", "best")
MEASURED = ("improved", "no_gain", "incorrect")
"""How a run ends on a GPU."""


@dataclass(frozen=True)
class Means:
    """Speedups over one baseline."""

    baseline: str
    count: int
    """Problems that both could be timed on; the means are over these."""
    geometric: float | None
    arithmetic: float | None
    fast_1: float
    """The part of *all* problems whose version is correct and faster than the baseline."""
    fast_2: float
    """The same for twice as fast."""


@dataclass(frozen=True)
class Score:
    """The results of one level, or of all."""

    level: str
    """Empty for all levels together."""
    problems: int
    """Those that are asked about, run or not."""
    statuses: Mapping[str, int]
    """How many ended ``improved``, ``no_gain``, ``incorrect``, ``unmeasured``, ``refused``, ``not_able``, ``timeout``,
    ``crashed``, or were ``not_run``."""
    correct: int
    """Problems with at least one version that was verified."""
    means: tuple[Means, ...]
    speeds: Mapping[str, int]
    """FASTER, SAME, SLOWER and AMBIGUOUS against the best baseline, of the last version that was kept."""
    median_seconds: float
    """Of wall time, of the problems that were run."""


@dataclass(frozen=True)
class Unsolved:
    """Problems that came to nothing for the same reason."""

    status: str
    reason: str
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Summary:
    """All that the results say."""

    environments: tuple[str, ...]
    """Where they were made; more than one means that the means mix machines."""
    scores: tuple[Score, ...]
    """All levels together, then each level."""
    unsolved: tuple[Unsolved, ...]
    """The most frequent reason first."""
    torch_calls: Mapping[str, int]
    """Operations that versions leave to torch, and on how many problems."""
    not_run: tuple[str, ...]


def summarise(records: Sequence[Mapping[str, Any]], asked: Sequence[tuple[str, str]] = ()) -> Summary:
    """The summary of the results; ``asked`` names the problems that should be there, each with its level."""
    done = {record["problem"] for record in records}
    not_run = tuple(name for name, _ in asked if name not in done)
    levels = sorted({record["level"] for record in records} | {level for _, level in asked})
    missing = Counter(level for name, level in asked if name not in done)
    scores = [_score("", records, len(not_run))]
    if len(levels) > 1:
        scores += [_score(level, [r for r in records if r["level"] == level], missing[level]) for level in levels]
    calls = Counter(op for record in records for op in set(record.get("torch_calls", ())))
    return Summary(
        tuple(sorted({_environment(r["environment"]) for r in records if "environment" in r})),
        tuple(scores),
        _unsolved(records),
        dict(calls.most_common()),
        not_run,
    )


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
    return Score(
        level,
        count,
        dict(statuses.most_common()),
        sum(_is_correct(record) for record in records),
        tuple(_means(name, records, count) for name in BASELINES),
        dict(speeds.most_common()),
        statistics.median(record["wall_seconds"] for record in records) if records else 0.0,
    )


def _is_correct(record: Mapping[str, Any]) -> bool:
    return any(s["verdict"] is not None and s["verdict"]["status"] == "correct" for s in record.get("steps", ()))


def _kept_timing(record: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The timing of the last version that was kept."""
    kept = [step["timing"] for step in record.get("steps", ()) if step["status"] == "accepted" and step["timing"]]
    found: Mapping[str, Any] | None = kept[-1] if kept else None
    return found


def _speed(record: Mapping[str, Any]) -> str:
    timing = _kept_timing(record)
    return timing["speed"] if timing is not None else ""


def _speedup(record: Mapping[str, Any], baseline: str) -> float | None:
    """What the problem comes to against a baseline; None where there is no time.

    Where no version was kept the user's own code stands, which is as fast as eager.
    """
    timing = _kept_timing(record)
    if timing is None:
        return 1.0 if baseline == "eager" and record["status"] in MEASURED else None
    ratios = {b["name"]: b["speedup"]["ratio"] for b in timing["baselines"] if b["speedup"]}
    ratio: float | None = ratios.get(timing["best"] if baseline == "best" else baseline)
    return ratio


def _means(baseline: str, records: Sequence[Mapping[str, Any]], count: int) -> Means:
    found = [ratio for record in records if (ratio := _speedup(record, baseline)) is not None]
    fast = [sum(ratio > limit for ratio in found) / count if count else 0.0 for limit in (1.0, 2.0)]
    geometric = math.exp(statistics.fmean(map(math.log, found))) if found else None
    return Means(baseline, len(found), geometric, statistics.fmean(found) if found else None, *fast)


def _unsolved(records: Sequence[Mapping[str, Any]]) -> tuple[Unsolved, ...]:
    groups: dict[tuple[str, str], list[str]] = {}
    for record in records:
        reason = why_nothing(record)
        if reason:
            groups.setdefault((record["status"], _general(reason)), []).append(record["problem"])
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    return tuple(Unsolved(status, reason, tuple(names)) for (status, reason), names in ordered)


def why_nothing(record: Mapping[str, Any]) -> str:
    """Why no version was kept; empty where one was."""
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
    """The reason without what differs from problem to problem: numbers and what a kernel or a module is called."""
    text = re.sub(r"\bModel(\.\w+)*", "the model", reason.strip().splitlines()[0])
    text = re.sub(r"\(on [^)]*\)", "", text)
    return re.sub(r"\d+(\.\d+)?(e-?\d+)?", "N", text).strip()
