"""Compares the results of calls on the same inputs, of the candidate and of the user's code. Runs in workers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from mtmc_lsp.core.workload import Capture
from mtmc_lsp.verify.cases import Case
from mtmc_lsp.verify.worker.comparison.batched_reads import unequal
from mtmc_lsp.verify.worker.run_target import device_for, outcome, plain, run_again

REFERENCE_CALLS = 8
"""Calls of the user's code to see whether its results differ. Additions in no fixed order often agree by chance."""
NUMBER = -1
"""Stands for the number of results, if that differs."""


def differing(first: Sequence[Any], other: Sequence[Any]) -> set[int]:
    """Numbers of the results of two calls that are not equal bit for bit."""
    if len(first) != len(other):
        return {NUMBER}
    pairs = {i: (a, plain(b)) for i, (a, b) in enumerate(zip(first, other, strict=True))}
    tensors = {i: (a, b) for i, (a, b) in pairs.items() if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)}
    return unequal(tensors) | {i for i, (a, b) in pairs.items() if i not in tensors and not bool(a == b)}


def are_identical(reference: Mapping[str, Any], candidate: Mapping[str, Any]) -> bool:
    """Whether two calls by :func:`run_case` return the same results and leave the same inputs, bit for bit."""
    has_same_names = reference["after"].keys() == candidate["after"].keys()
    return has_same_names and not differing(outcome(reference), outcome(candidate))


def not_explained(
    differing_results: Sequence[int],
    module: Any,
    capture: Capture,
    inputs: Mapping[str, torch.Tensor],
    expected: Mapping[str, Any],
    case: Case,
) -> list[int]:
    """Of the candidate's results that differ from call to call, those in which the user's code is deterministic.

    Several gradients of torch (average pooling, embedding, indexing) add in no fixed order on a GPU. A candidate that
    uses them is as deterministic as the user's code.

    Args:
        expected: the results of the user's code on these inputs.
    """
    unexplained = set(differing_results)
    device = device_for(capture, case.kind)
    with _in_any_order():
        for _ in range(REFERENCE_CALLS):
            if not unexplained - {NUMBER}:
                break
            run = run_again(module, capture, inputs, device, case)
            unexplained -= differing(outcome(expected), outcome(run)) - {NUMBER}
    return sorted(unexplained)


@contextlib.contextmanager
def _in_any_order() -> Iterator[None]:
    """Allow nondeterministic algorithms, as in the user's program; filling new memory with NaN disables them."""
    is_fixed = torch.are_deterministic_algorithms_enabled()
    torch._C._set_deterministic_algorithms(False, warn_only=True)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(is_fixed, warn_only=True)
