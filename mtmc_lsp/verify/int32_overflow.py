"""Sizes at which element offsets exceed 32 bits, if the GPU has the memory for them."""

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
"""The smallest offset that a signed 32-bit integer cannot represent."""
COPIES = 4
"""Most copies of arguments and results that both processes hold together."""
MEMORY_PART = 0.8
"""Share of the free memory that may be used."""
MOST_WORK = 1e14
"""Limit for the multiply-adds of the reference."""


def far_sizes(capture: Capture, free_bytes: float) -> tuple[dict[str, int], str]:
    """The workload's sizes with one of them so large that an argument has an element at an offset of 2^31 or beyond.

    Only sizes of leading dimensions are enlarged, since one program instance often holds a whole row. Of several such
    sizes, the one that needs the least memory is enlarged.

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
            if conditions_hold(graph.conditions, sizes) and product_work(graph, sizes) <= MOST_WORK:
                possible.append((_bytes(capture, arguments, sizes), sizes))
    if not possible:
        return {}, "no leading size of an argument can be enlarged so far"
    needed, sizes = min(possible, key=lambda item: item[0])
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
