"""Divides the cases of one candidate between two processes, which run side by side."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor

from mtmc_lsp.verify.cases import Case
from mtmc_lsp.verify.outcomes import CaseOutcome

FIRST_WEIGHT = 2
"""The first case counts as two: it has further calls, and the process loads the candidate's kernels and its libraries for it."""
LEAST_GROUPS = 2
"""Sizes that each process runs at least: a version may be wrong only after a call at other sizes."""

RunCase = Callable[[Case], CaseOutcome]
"""Runs a case in one of the processes."""


def lanes(cases: Sequence[Case]) -> tuple[list[int], list[int]] | None:
    """The numbers of the cases for the first and for the second process; None if there are too few sizes for two.

    Cases of the same sizes and kind run in one process, in their order: libraries choose an algorithm for each operation at new
    sizes, and kernels may be compiled. The division depends on the cases alone, so each verification of a version repeats it.
    """
    groups: dict[Hashable, list[int]] = {}
    for number, case in enumerate(cases):
        groups.setdefault((case.kind, *sorted(case.sizes.items())), []).append(number)
    divided: tuple[list[list[int]], list[list[int]]] = ([], [])
    weights = [0, 0]
    for group in groups.values():
        is_first = group[0] == 0
        lane = 0 if is_first or weights[0] <= weights[1] else 1
        divided[lane].append(group)
        weights[lane] += FIRST_WEIGHT if is_first else 1
    if min(map(len, divided)) < LEAST_GROUPS:
        return None
    first, second = (sorted(number for group in lane for number in group) for lane in divided)
    return first, second


def run_side_by_side(
    cases: Sequence[Case], divided: Sequence[Sequence[int]], runs: Sequence[RunCase]
) -> list[CaseOutcome]:
    """The outcomes of the cases in their order, up to the first failure.

    Cases after a failed one do not begin. Those before it run to their end, so that the same failure is reported each time.

    Args:
        divided: for each process the numbers of its cases, in their order.
        runs: for each process how it runs a case.
    """
    outcomes: dict[int, CaseOutcome] = {}
    end = len(cases)
    changing = threading.Lock()

    def run_lane(numbers: Sequence[int], run: RunCase) -> None:
        nonlocal end
        for number in numbers:
            if number >= end:
                return
            try:
                outcome = run(cases[number])
            except BaseException:
                with changing:
                    end = 0
                raise
            with changing:
                outcomes[number] = outcome
                if not outcome.is_correct:
                    end = min(end, number)

    with ThreadPoolExecutor(len(divided)) as threads:
        running = [threads.submit(run_lane, *each) for each in zip(divided, runs, strict=True)]
    for each in running:
        each.result()
    return [outcomes[number] for number in sorted(outcomes) if number <= end]
