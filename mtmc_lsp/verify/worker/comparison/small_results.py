"""Small elements of results, which the relative error of a whole result does not show. Runs in workers.

Some operations keep the relative precision of each element: products, quotients, powers, exponentials, softmax. If only these
are between the arguments and a result, an element of 1e-12 is as precise as one of 1, and an element that is 0 instead is wrong.
"""

from __future__ import annotations

import torch

from mtmc_lsp.core.dtypes import EPSILON
from mtmc_lsp.core.graph import MATRIX_PRODUCTS, Graph, Ref
from mtmc_lsp.verify.worker.comparison.batched_reads import computable
from mtmc_lsp.verify.worker.comparison.distances import comparable, pieces, sums_piece

EXPONENTIALS = frozenset(("exp", "exp2", "softmax"))
"""Operations whose results are relatively precise if their operands are absolutely precise."""
PRECISE = frozenset(
    "mul div neg abs relu sqrt rsqrt reciprocal pow square maximum minimum amax amin where clamp to to_copy clone copy "
    "contiguous alias detach view reshape unsafe_view permute transpose t unsqueeze squeeze expand slice select flatten flip "
    "cat stack".split()
)
"""Operations whose results are relatively precise if their operands are."""
LIMIT = 0.05
"""The permitted relative error of one element; with 16 bits, that of this many units in the last place if it is larger."""
UNITS = 16
REFERENCE_PART = 0.25
"""The reference must be more precise than this part of the limit at an element."""
LEAST = 1e-30
"""Smaller results may depend on numbers below the range of float32."""


def precise_results(graph: Graph) -> frozenset[int]:
    """The numbers of the returned tensors whose elements are all relatively precise."""
    if any(node.op.split(".")[1] in MATRIX_PRODUCTS or "conv" in node.op for node in graph.nodes):
        # Their rounding errors are as large as that of the largest term.
        return frozenset()
    is_precise: dict[str, bool] = {item.name: True for item in graph.inputs}
    for node in graph.nodes:
        word = node.word
        is_precise[node.name] = word in EXPONENTIALS or (
            word in PRECISE and all(is_precise.get(ref.name, False) for ref in node.inputs())
        )
    results = graph.forward_outputs
    return frozenset(i for i, ref in enumerate(results) if isinstance(ref, Ref) and is_precise.get(ref.name, False))


def imprecise_elements(candidate: torch.Tensor, reference: torch.Tensor, oracle: torch.Tensor) -> torch.Tensor:
    """How many elements of a relatively precise result are wrong, and how many were compared; still on the device.

    On a CPU the second number leaves out parts of the result without a suspicious element.
    """
    name = str(reference.dtype).removeprefix("torch.")
    limit = max(LIMIT, UNITS * EPSILON[name])
    least = max(LEAST, UNITS * torch.finfo(reference.dtype).tiny)
    counts = torch.zeros(2, dtype=torch.float64, device=reference.device)
    for part, reference_part, oracle_part in pieces(candidate, reference, oracle, most=sums_piece(reference)):
        truth = oracle_part.double()
        size = truth.abs()
        is_right = (computable(part).double() - truth).abs() <= limit * size
        if is_right.device.type == "cpu" and bool(is_right.all()):
            continue
        reference_error = (computable(reference_part).double() - truth).abs()
        is_compared = (
            comparable(reference_part, oracle_part)
            & (size >= least)
            & (reference_error <= REFERENCE_PART * limit * size)
        )
        counts += torch.stack([torch.count_nonzero(mask) for mask in (is_compared & ~is_right, is_compared)])
    return counts
