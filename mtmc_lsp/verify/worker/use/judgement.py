"""Compares what a candidate gives in each step with what the reference gives. Runs in workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mtmc_lsp.core.dtypes import TOLERANCE
from mtmc_lsp.core.results import Check, CheckStatus
from mtmc_lsp.verify.error_limits import FACTORS
from mtmc_lsp.verify.use.uses import MAY_RAISE
from mtmc_lsp.verify.worker.comparison.batched_reads import computable
from mtmc_lsp.verify.worker.comparison.compare import Comparison
from mtmc_lsp.verify.worker.comparison.distances import oracle_distance
from mtmc_lsp.verify.worker.observation.determinism import differing
from mtmc_lsp.verify.worker.use.calls import CHANGES
from mtmc_lsp.verify.worker.use.construction import DISTRIBUTION, distribution_problem
from mtmc_lsp.verify.worker.use.script import Expectation
from mtmc_lsp.verify.worker.use.steps import Entry


def checks_of(
    expected: Sequence[Expectation],
    observed: Mapping[str, Mapping[str, Any]],
    precision: str,
) -> list[Check]:
    """One check for each step.

    Args:
        observed: by key of a step ``entries``, ``raised`` or ``skipped``, as the candidate's process reports it.
        precision: ``budget`` or ``strict``, as in the settings.
    """
    checks = []
    for expectation in expected:
        use = expectation.use
        name, outcome = f"use: {use.key}", observed.get(use.key, {"skipped": "it was not reached in time"})
        if "skipped" in outcome:
            checks.append(Check(name, CheckStatus.SKIPPED, "", str(outcome["skipped"])))
        elif "raised" in outcome:
            problem = f"it raises {outcome['raised']}"
            if use.kind in MAY_RAISE:
                checks.append(Check(name, CheckStatus.SKIPPED, "", problem))
            else:
                checks.append(Check(name, CheckStatus.FAILED, "", f"{use.words} {problem}"))
        else:
            problem = _problem(expectation, _entries(outcome), precision)
            status = CheckStatus.FAILED if problem else CheckStatus.PASSED
            checks.append(Check(name, status, "", f"{use.words} {problem}" if problem else ""))
    return checks


def _entries(outcome: Mapping[str, Any]) -> list[Entry]:
    return [Entry(str(name), value) for name, value in outcome["entries"]]


def _problem(expectation: Expectation, observed: list[Entry], precision: str) -> str:
    """What differs, as the rest of a sentence; empty if nothing does."""
    expected = expectation.entries
    if expectation.use.kind == "many_calls":
        # Its time may have been over earlier.
        expected = expected[: max(len(observed), 1)]
    if [entry.name for entry in observed] != [entry.name for entry in expected]:
        return f"there are {len(observed)} results instead of {len(expected)}"
    if expectation.use.kind == "autocast":
        return _autocast_problem(expectation, observed)
    for i, (entry, candidate) in enumerate(zip(expected, observed, strict=True)):
        if entry.value is None or (entry.is_optional and candidate.value is None):
            continue
        if entry.name == CHANGES:
            more = [name for name in str(candidate.value).split(", ") if name not in str(entry.value).split(", ")]
            if more:
                return f"it changes {', '.join(more)}"
            continue
        if entry.name.startswith(DISTRIBUTION):
            problem = distribution_problem(entry.value, candidate.value)
            if problem:
                return f"{entry.name} is wrong: {problem}"
            continue
        problem = difference(entry, candidate.value, expectation.sensitivity[i], precision)
        if problem and entry.changed and _is_stale(i, observed):
            return f"the result is still that of the earlier values ({entry.changed})"
        if problem:
            return f"{entry.name} is wrong: {problem}"
    return ""


def _is_stale(i: int, observed: list[Entry]) -> bool:
    """Whether a result after a change equals the one before it."""
    number = observed[i].name.rpartition("result ")[2]
    earlier = [entry.value for entry in observed[:i] if entry.name == f"result {number}"]
    return bool(earlier) and not differing([earlier[-1]], [observed[i].value])


def difference(entry: Entry, candidate: Any, sensitivity: float, precision: str) -> str:
    """How a candidate's value differs from the reference's; empty if it does not."""
    if isinstance(candidate, torch.Tensor) and _is_zero(entry.value) and candidate.shape == entry.value.shape:
        largest = float(candidate.double().abs().max()) if candidate.numel() else 0.0
        # A relative error would be infinite for any rounding.
        is_small = largest <= TOLERANCE[str(entry.value.dtype).removeprefix("torch.")]
        return "" if is_small else f"its values are up to {largest:.2e} instead of 0"
    comparison = Comparison(precision)
    # Strides of results are part of the contract for the ordinary cases alone.
    comparison.tensor(entry.name, candidate, entry.value, entry.value, sensitivity, None)
    failed = (c for c in comparison.finish()[0] if c["status"] == "failed" and not c["name"].endswith(" stride"))
    return next((check["detail"] for check in failed), "")


def _is_zero(value: Any) -> bool:
    """Whether a floating-point result is zero everywhere."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and not bool((computable(value) != 0).any())


def _autocast_problem(expectation: Expectation, observed: list[Entry]) -> str:
    """Under autocast, a result may be in the reference's lower precision, or as precise as without autocast."""
    half = len(expectation.entries) // 2
    for i in range(half):
        lower, usual = expectation.entries[i].value, expectation.entries[half + i].value
        candidate, name = observed[i].value, expectation.entries[i].name
        if lower is None or usual is None or not isinstance(lower, torch.Tensor) or not lower.is_floating_point():
            continue
        if not isinstance(candidate, torch.Tensor) or candidate.dtype not in (lower.dtype, usual.dtype):
            kind = candidate.dtype if isinstance(candidate, torch.Tensor) else type(candidate).__name__
            return f"{name} is wrong: {kind} instead of {lower.dtype}"
        if candidate.shape != lower.shape:
            return f"{name} is wrong: shape {tuple(candidate.shape)} instead of {tuple(lower.shape)}"
        # Where the reference computes in the lower precision, both of its results are right.
        own = float(oracle_distance(lower.double(), usual.double(), usual.double()))
        dtype = str(lower.dtype if own else usual.dtype).removeprefix("torch.")
        rounding = TOLERANCE["bfloat16"] if own else TOLERANCE[dtype]
        limit = max(rounding, FACTORS["budget"] * own, FACTORS["budget"] * expectation.sensitivity[half + i])
        error = float(oracle_distance(candidate.double(), usual.double(), usual.double()))
        if not error <= limit:
            return f"{name} is wrong: relative L2 error {error:.2e}, the limit is {limit:.2e}"
    return ""
