"""A call at sizes at which element offsets exceed 32 bits, if the GPU has the memory for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mtmc_lsp.core.dtypes import itemsize
from mtmc_lsp.core.errors import FailureKind, MtmcError
from mtmc_lsp.core.graph import InputKind, TensorType
from mtmc_lsp.core.results import Check, CheckStatus, VerdictStatus
from mtmc_lsp.core.sizes import conditions_hold
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.verify.cases import Case
from mtmc_lsp.verify.outcomes import CaseOutcome
from mtmc_lsp.verify.sizes.case_sizes import has_more_iterations, iterated_bytes
from mtmc_lsp.verify.sizes.interpreter_limits import product_work

FAR_CHECK = "offsets beyond 2^31"
OTHERS_FILL = "another run filled the memory of the GPU until the budget was almost used up"
FAR_SEED = 1000
FAR = 1 << 31
"""The smallest offset that a signed 32-bit integer cannot represent."""
COPIES = 4
"""Most copies of arguments and results that both processes hold together."""
MEMORY_PART = 0.8
"""Share of the free memory that may be used."""
SHARE_OF_CALL = 0.5
"""Most of the rest of the budget that one call of the user's code may take: inputs, oracle and comparison take as long."""
MOST_WORK = 1e14
"""Limit for the multiply-adds of the reference."""


def far_sizes(capture: Capture, free_bytes: float) -> tuple[dict[str, int], str]:
    """The workload's sizes with one of them so large that an argument has an element at an offset of 2^31 or beyond.

    Only sizes of leading dimensions are enlarged, since one program instance often holds a whole row. Of several such
    sizes, the one that needs the least memory is enlarged. A size that counts the iterations of a user's loop is not: one
    launch after another would take hours.

    Returns:
        The sizes and an empty text, or no sizes and the reason.
    """
    graph = capture.graph
    arguments = [item.type for item in graph.inputs if item.kind is InputKind.ARGUMENT]
    leading = {name for kind in arguments if kind.shape for name in kind.shape[0].symbols()}
    within = {name for kind in arguments for size in kind.shape[1:] for name in size.symbols()}
    names = [name for name in capture.variable_sizes if name in leading - within]
    possible = []
    for name in names:
        per_step = max(kind.numel.value({**graph.sizes, name: 1}) for kind in arguments if _counts(kind, name))
        if per_step:
            sizes = {**graph.sizes, name: FAR // per_step + 1}
            is_allowed = conditions_hold(graph.conditions, sizes) and not has_more_iterations(graph, sizes)
            if is_allowed and product_work(graph, sizes) <= MOST_WORK:
                possible.append((_bytes(capture, arguments, sizes), sizes))
    if not possible:
        return {}, "no leading size of an argument can be enlarged so far"
    needed, sizes = min(possible, key=lambda item: item[0])
    if needed > MEMORY_PART * free_bytes:
        return {}, f"{needed / 1e9:.0f} GB are needed, {MEMORY_PART * free_bytes / 1e9:.0f} GB may be used"
    return sizes, ""


def too_slow(capture: Capture, sizes: Mapping[str, int], bandwidth: float, seconds: float) -> str:
    """Why a call at such sizes cannot be verified in the rest of the budget; empty if it can.

    Args:
        bandwidth: bytes per second that the GPU copies; 0 if unknown.
        seconds: the rest of the budget.
    """
    needed = iterated_bytes(capture.graph, sizes) / bandwidth if bandwidth else 0.0
    if SHARE_OF_CALL * seconds >= needed:
        return ""
    left = max(0.0, seconds)
    return f"a call of your code takes at least {needed:.0f} s at such sizes, and {left:.0f} s of the budget are left"


def far_check(run: Callable[[], CaseOutcome | None], case: Case, needs_kernel: bool) -> Check:
    """The check of a call at such sizes; skipped, with the reason, if the call proves nothing.

    Args:
        run: calls the candidate on ``case``; ``None`` if the reference does not accept it.

    Raises:
        WorkerFailed: the run was cancelled.
    """

    def skipped(why: str) -> Check:
        return Check(FAR_CHECK, CheckStatus.SKIPPED, case.label, why)

    try:
        outcome = run()
    except MtmcError as error:
        if error.kind is FailureKind.CANCELLED:
            raise
        return skipped(error.message)
    if outcome is None:
        return skipped("the reference does not accept such sizes here")
    if not outcome.is_correct:
        # A lack of time or memory proves nothing about the code.
        is_limit = outcome.status is VerdictStatus.TIMEOUT or outcome.is_out_of_memory
        return skipped(outcome.reason) if is_limit else Check(FAR_CHECK, CheckStatus.FAILED, case.label, outcome.reason)
    if needs_kernel and not outcome.launches:
        return skipped("no kernel runs at such sizes")
    return Check(FAR_CHECK, CheckStatus.PASSED, case.label)


def _counts(kind: TensorType, name: str) -> bool:
    return bool(kind.shape) and name in kind.shape[0].symbols()


def _bytes(capture: Capture, arguments: list[TensorType], sizes: Mapping[str, int]) -> float:
    """Both processes' copies, and two tensors in double precision to compare."""
    graph = capture.graph
    results = [graph.type_of(ref) for ref in graph.outputs]
    held = sum(kind.numel.value(sizes) * itemsize(kind.dtype) for kind in (*arguments, *results))
    return COPIES * held + 16.0 * max((kind.numel.value(sizes) for kind in results), default=0)
