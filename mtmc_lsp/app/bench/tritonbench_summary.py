"""Counts over the results of TritonBench-G, and the reasons why files are not faster."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtmc_lsp.kernels.refusals import DISTURBED, Stage

KEPT, UNTIMED = "an edit was kept", "an edit was verified, and not timed"
NOT_RUN = (
    (r"[Bb]lock pointers have been removed", "block pointers, which this version of Triton removed"),
    (r"takes too long under the interpreter", "too long under the interpreter"),
    (r"the time limit was reached", "the time ended before the original had run"),
    (r"no test calls|launches no kernel", "no test launches its kernels"),
    (r"cannot be loaded", "the file cannot be loaded"),
    (r"compiled without CUDA|NoneType|exchangeDevice", "a function of torch.cuda without a stand-in"),
    (r"", "the original raises another error"),
)
"""Reasons of originals that do not run, and their causes."""
AFTER_EDITS = (
    (Stage.NOT_FASTER, "tried: no edit is faster"),
    (Stage.LAUNCH_BOUND, "tried: the launch takes most of the time"),
    (Stage.DISTURBED, "tried: another program disturbed the timing"),
    (Stage.TIME_ENDED, "tried: the time ended"),
    (Stage.WRONG, "tried: an edit is wrong"),
    (Stage.NOT_COMPARED, "tried: the results of the original vary"),
    (Stage.COMPILE, "tried: an edit does not compile"),
    (Stage.STATISTICS, "tried: an edit spills more"),
    (Stage.ERROR, "tried: an edit raises an error"),
)
"""Causes by the stage at which edits of a file were refused. The first stage in this order counts."""
LAUNCH_TEXT = "the launch takes most of"


def cause_of(record: Mapping[str, Any]) -> str:
    """The stage at which a file ended, and why. Each file counts once."""
    if not record["runs"]:
        return "not run: " + next(name for pattern, name in NOT_RUN if re.search(pattern, record["reason"]))
    if record["applied"]:
        return KEPT if record["speedup"] else UNTIMED
    stages = _stages(record)
    if stages:
        return next(name for stage, name in AFTER_EDITS if stage in stages)
    if record["tried"]:
        # Results of earlier versions do not tell why.
        return "tried: none was kept"
    if limit := record.get("limit"):
        return (
            "run: the launch takes most of the time" if LAUNCH_TEXT in limit else "run: the kernels are at the roofline"
        )
    # A run that was cancelled at the end of its time gives no reason.
    reason = record.get("end_reason")
    ended = reason is not None and (not reason or "limit" in reason)
    return "run: the time ended before an edit" if ended else "run: no edit is legal"


def _stages(record: Mapping[str, Any]) -> set[Stage]:
    """The stages at which edits ended; of results of earlier versions, as far as their texts tell."""
    if "refused" in record:
        return {Stage(refusal["stage"]) for refusal in record["refused"]}
    rejected, failed = record.get("rejected") or (), record["failed"]
    stages = {Stage.LAUNCH_BOUND if LAUNCH_TEXT in text else Stage.NOT_FASTER for text in rejected}
    return stages | {Stage.DISTURBED if DISTURBED in text else Stage.ERROR for text in failed}


@dataclass(frozen=True)
class KernelSummary:
    """Counts over all files."""

    files: int
    read: int
    run: int
    """Originals whose test runs."""
    compiled: int
    faulty: int
    """Originals that run and show a fault."""
    delivered: int
    """Files with an edit that verified."""
    call: int
    execution: int
    timed: int
    faster: int
    by_rows: int
    """Those of the faster ones whose gain shows in rows of calls, which the host bounds."""
    in_test: int
    """Those of the faster ones that gain in the launches of their test alone, and not with the largest inputs."""
    geometric_mean: float | None
    """Of the speedups of all timed files."""
    mean_of_run: float | None
    """Of all files that run, those without a kept edit as 1; None if nothing was timed."""
    edits: dict[str, int]
    """Files by the kind of an accepted edit."""
    refused: dict[str, dict[str, int]]
    """Edits that were not kept, by kind and stage."""
    causes: dict[str, int]
    """Files by the stage at which they ended."""
    seconds: dict[str, float]
    """Seconds of all files, by what they were spent on."""


def summarise_kernels(records: Sequence[Mapping[str, Any]]) -> KernelSummary:
    """The counts of a file of results."""
    speedups = [float(r["speedup"]) for r in records if r.get("speedup")]
    running = sum(bool(r["runs"]) for r in records)
    logarithm = sum(map(math.log, speedups))
    refusals: dict[str, Counter[str]] = {}
    for refusal in (refusal for r in records for refusal in r.get("refused", ())):
        refusals.setdefault(refusal["change"], Counter())[refusal["stage"]] += 1
    seconds: Counter[str] = Counter()
    for record in records:
        seconds.update(record.get("seconds", {}))
    return KernelSummary(
        len(records),
        sum(r["read"] for r in records),
        running,
        sum(r["compiled"] for r in records),
        sum(bool(r["fault"]) for r in records),
        sum(bool(r["applied"]) for r in records),
        sum(r["call"] is True for r in records),
        sum(r["execution"] is True for r in records),
        len(speedups),
        sum(value > 1.0 for value in speedups),
        sum(bool(r.get("by_rows")) and float(r["speedup"] or 0.0) > 1.0 for r in records),
        sum(bool(r.get("in_test")) and float(r["speedup"] or 0.0) > 1.0 for r in records),
        math.exp(logarithm / len(speedups)) if speedups else None,
        math.exp(logarithm / running) if speedups and running else None,
        dict(Counter(kind for record in records for kind in sorted(set(record["applied"])))),
        {kind: dict(stages) for kind, stages in refusals.items()},
        dict(Counter(map(cause_of, records))),
        {name: round(total, 1) for name, total in seconds.items()},
    )
