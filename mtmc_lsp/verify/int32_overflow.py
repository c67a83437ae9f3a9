"""Sizes at which the offsets of elements no longer fit into 32 bits, where a GPU has memory for them."""

from __future__ import annotations

from collections.abc import Mapping

from mtmc_lsp.core.dtypes import itemsize
from mtmc_lsp.core.graph import InputKind, TensorType
from mtmc_lsp.core.sizes import conditions_hold
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.verify.cases import product_work

FAR_CHECK = "offsets beyond 2^31"
FAR_SEED = 1000
FAR = 1 << 31
"""The first offset that a signed number of 32 bits does not hold."""
COPIES = 4
"""How many copies of arguments and results both processes hold at most."""
MEMORY_PART = 0.8
"""Of the free memory that may be planned for."""
MOST_WORK = 1e14
"""Multiply-adds of the reference."""


def far_sizes(capture: Capture, free_bytes: float) -> tuple[dict[str, int], str]:
    """The workload's sizes with one enlarged so far that an argument has an element at an offset of 2^31 or beyond.

    Of those that can be enlarged, one that counts leading dimensions of arguments alone: a row is often held by one
    program, which none can at such a length. What takes the least memory is chosen.

    Args:
        capture: of the reference.
        free_bytes: the GPU's free memory.

    Returns:
        The sizes, and empty text; or no sizes, and why there are none.
    """
    graph = capture.graph
    arguments = [item.type for item in graph.inputs if item.kind is InputKind.ARGUMENT]
    leading = {name for kind in arguments if kind.shape for name in kind.shape[0].symbols()}
    within = {name for kind in arguments for size in kind.shape[1:] for name in size.symbols()}
    names = [name for name in capture.variable_sizes if name in leading - within]
    found = []
    for name in names:
        per_step = max(kind.numel.value({**graph.sizes, name: 1}) for kind in arguments if _counts(kind, name))
        if per_step:
            sizes = {**graph.sizes, name: FAR // per_step + 1}
            if conditions_hold(graph.conditions, sizes) and product_work(graph, sizes) <= MOST_WORK:
                found.append((_bytes(capture, arguments, sizes), sizes))
    if not found:
        return {}, "no leading size of an argument can be enlarged so far"
    needed, sizes = min(found, key=lambda item: item[0])
    if needed > MEMORY_PART * free_bytes:
        return {}, f"{needed / 1e9:.0f} GB are needed, {MEMORY_PART * free_bytes / 1e9:.0f} GB may be used"
    return sizes, ""


def _counts(kind: TensorType, name: str) -> bool:
    return bool(kind.shape) and name in kind.shape[0].symbols()


def _bytes(capture: Capture, arguments: list[TensorType], sizes: Mapping[str, int]) -> float:
    """Both processes' copies, and two tensors in double precision to compare."""
    graph = capture.graph
    results = [graph.type_of(ref) for ref in graph.outputs]
    held = sum(kind.numel.value(sizes) * itemsize(kind.dtype) for kind in (*arguments, *results))
    return COPIES * held + 16.0 * max((kind.numel.value(sizes) for kind in results), default=0)
