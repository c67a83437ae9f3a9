"""Counts over the results of TritonBench-G, and the reasons why files are not faster."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtmc_lsp.kernels.optimizer import LAUNCH_BOUND

ENDED = "the time ended"


def cause_of(record: Mapping[str, Any]) -> str:
    """Why a file is not faster; empty if it is, or if nothing was timed."""
    rejected, failed = record.get("rejected") or [], record["failed"]
    if record["applied"]:
        return ""
    if not record["runs"]:
        return ENDED if "time limit" in record.get("reason", "") else "the original does not run"
    if any("another program" in text for text in failed) and not rejected:
        return "another program disturbed the timing"
    if rejected:
        is_bound = all(LAUNCH_BOUND in text for text in rejected)
        return "the launch takes most of the time" if is_bound else "no edit is faster"
    if failed:
        return "no edit verified"
    return "no edit is legal" if not record["tried"] and "legal" in record.get("end_reason", "") else ENDED


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
    geometric_mean: float | None
    """Of the speedups of all timed files."""
    edits: dict[str, int]
    """Files by the kind of an accepted edit."""
    causes: dict[str, int]
    """Files by the reason why they are not faster."""


def summarise_kernels(records: Sequence[dict[str, Any]]) -> KernelSummary:
    """The counts of a file of results."""
    speedups = [float(r["speedup"]) for r in records if r.get("speedup")]
    edits: dict[str, int] = {}
    for record in records:
        for kind in sorted(set(record["applied"])):
            edits[kind] = edits.get(kind, 0) + 1
    mean = math.exp(sum(map(math.log, speedups)) / len(speedups)) if speedups else None
    return KernelSummary(
        len(records),
        sum(r["read"] for r in records),
        sum(r["runs"] for r in records),
        sum(r["compiled"] for r in records),
        sum(bool(r["fault"]) for r in records),
        sum(bool(r["applied"]) for r in records),
        sum(r["call"] is True for r in records),
        sum(r["execution"] is True for r in records),
        len(speedups),
        sum(value > 1.0 for value in speedups),
        mean,
        edits,
        dict(Counter(cause for record in records if (cause := cause_of(record)))),
    )
