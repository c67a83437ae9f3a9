"""Looks for the same failure at smaller sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mtmc_lsp.core.errors import MtmcError
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.verify.cases import Case
from mtmc_lsp.verify.outcomes import CaseOutcome

SHRINK_TRIES = 8
"""Limit for the smaller versions of a failing case."""


def shrunk(failed: CaseOutcome, capture: Capture, run: Callable[[Case], CaseOutcome | None]) -> CaseOutcome:
    """The same failure at smaller sizes: the largest size is halved while the candidate still fails.

    Args:
        run: runs a case.
    """
    variable = [name for name in capture.variable_sizes if name in failed.case.sizes]
    fixed: set[str] = set()
    for _ in range(SHRINK_TRIES if failed.may_be_smaller else 0):
        names = [name for name in variable if failed.case.sizes[name] > 1 and name not in fixed]
        if not names:
            break
        sizes = failed.case.sizes
        largest = max(names, key=lambda name: sizes[name])
        case = replace(failed.case, sizes={**sizes, largest: sizes[largest] // 2})
        try:
            outcome = run(case)
        except MtmcError:
            outcome = None
        if outcome is None or outcome.status is not failed.status or outcome.needs_order != failed.needs_order:
            fixed.add(largest)
        else:
            failed = outcome
    return failed
