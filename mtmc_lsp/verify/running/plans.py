"""Which calls a candidate makes on a case."""

from __future__ import annotations

from mtmc_lsp.verify.adapters import Adapter
from mtmc_lsp.verify.case_runner import MANY_CALLS
from mtmc_lsp.verify.cases import ON_CPU, Case
from mtmc_lsp.verify.messages import CallPlan, GridOrder

SMALL_CASE_ELEMENTS = 512
"""Cases with at most this many elements of arguments are called several times under the interpreter, too."""


def call_plan(
    candidate: Adapter, case: Case, elements: int, *, is_first: bool, is_many: bool, has_gpu: bool
) -> CallPlan:
    """The calls on a case. Under the interpreter, only small cases are repeated, because large ones are slow.

    Args:
        elements: of the case's arguments.
        is_first: whether the case is the workload.
        is_many: whether it is the case for many calls.
    """
    if is_many:
        foreign = candidate.is_foreign
        return CallPlan(
            changes_contents=True,
            repeats=MANY_CALLS,
            repeat_seconds=candidate.repeat_seconds,
            moves_counts=foreign,
            keeps_results=foreign,
            adds_instance=foreign,
        )
    if case.kind == ON_CPU:
        # Each call of the user's code may take a second there, and no kernel runs.
        return CallPlan()
    order = GridOrder.USUAL if is_first or has_gpu else list(GridOrder)[case.seed % len(GridOrder)]
    repeats = has_gpu or elements <= SMALL_CASE_ELEMENTS
    counts_library = is_first and candidate.is_foreign
    return CallPlan(
        is_first or repeats, int(repeats), disables_kernels=is_first, counts_library=counts_library, order=order
    )
