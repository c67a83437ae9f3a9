"""The errors that running sums and products in another order may have. Runs in workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch

from mtmc_lsp.core.dtypes import EPSILON
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.verify.cases import EXPANDED_COLUMNS, Case

SCANS = frozenset(("cumsum", "cumprod", "logcumsumexp"))
SCAN_ERROR, EQUAL_SCAN_ERROR = 0.05, 0.012
"""Error of a running sum of n numbers, one after the other, divided by the factor of the budget: as a part of epsilon times the
square root of n for random numbers (at most 0.38 in 30 draws each of n from 64 to 65,536), and of epsilon times n for equal ones,
whose rounding adds up (at most 0.09). Torch on a CPU adds in higher precision."""

Key = TypeVar("Key", bound="int | str")
"""Of a result: its number, or the name of a changed input."""


def scan_errors(graph: Graph, case: Case, expected: Mapping[Key, torch.Tensor]) -> dict[Key, float]:
    """By floating-point result: the error that a scan in another order may have."""
    length = scan_length(graph, case.sizes)
    growth = max(SCAN_ERROR * length**0.5, EQUAL_SCAN_ERROR * length if has_equal_values(case) else 0.0)
    widest = {
        i: "float64" if value.dtype is torch.float64 else "float32"
        for i, value in expected.items()
        if value.is_floating_point()
    }
    return {i: growth * EPSILON[dtype] for i, dtype in widest.items()} if length else {}


def has_equal_values(case: Case) -> bool:
    """Whether all elements of a line have one value, so that rounding errors add up or cancel exactly."""
    return case.distribution == "constant" or case.layout == EXPANDED_COLUMNS


def scan_length(graph: Graph, sizes: Mapping[str, int]) -> int:
    """The largest number of elements that a running sum or product adds up; 0 without any."""
    lengths = [0]
    for node in graph.nodes:
        if node.op.split(".")[1] in SCANS and node.type.shape:
            dim = node.args[1] if len(node.args) > 1 and isinstance(node.args[1], int) else -1
            lengths.append(node.type.shape[dim].value(sizes))
    return max(lengths)
