"""Whether calls on the same inputs give the same results: the candidate's, and the user's own code's. Runs in workers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from mtmc_lsp.core.workload import Capture
from mtmc_lsp.verify.worker.comparison.batched_reads import unlike
from mtmc_lsp.verify.worker.run_target import device_for, outcome, plain, run_again

OWN_CALLS = 8
"""How often the user's own code is called to see whether its results differ: additions in no fixed order often agree."""
NUMBER = -1
"""Stands for the number of outcomes, where that differs."""


def differing(first: Sequence[Any], other: Sequence[Any]) -> set[int]:
    """Which outcomes of two calls are not the same, bit for bit."""
    if len(first) != len(other):
        return {NUMBER}
    pairs = {i: (a, plain(b)) for i, (a, b) in enumerate(zip(first, other, strict=True))}
    tensors = {i: (a, b) for i, (a, b) in pairs.items() if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)}
    return unlike(tensors) | {i for i, (a, b) in pairs.items() if i not in tensors and not bool(a == b)}


def not_explained(
    found: Sequence[int],
    module: Any,
    capture: Capture,
    inputs: Mapping[str, torch.Tensor],
    want: Mapping[str, Any],
    case: Mapping[str, Any],
) -> list[int]:
    """Of results that differ from call to call, those that the user's own code gives alike each time.

    Several of torch's gradients (of average pooling, of an embedding, of indexing) add in no fixed order on a GPU. A
    candidate that leaves them to torch is no less settled than what it stands for.

    Args:
        found: numbers of the candidate's outcomes that differ.
        module: the user's own.
        capture: of it.
        inputs: of the case.
        want: what the user's own code gave on them.
        case: as in a request.
    """
    left = set(found)
    device = device_for(capture, case["kind"])
    with _in_any_order():
        for _ in range(OWN_CALLS):
            if not left - {NUMBER}:
                break
            run = run_again(module, capture, inputs, device, case)
            left -= differing(outcome(want), outcome(run)) - {NUMBER}
    return sorted(left)


@contextlib.contextmanager
def _in_any_order() -> Iterator[None]:
    """As the user runs it: what fills new memory, where that is asked for, also makes torch add in a fixed order."""
    is_fixed = torch.are_deterministic_algorithms_enabled()
    torch._C._set_deterministic_algorithms(False, warn_only=True)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(is_fixed, warn_only=True)
