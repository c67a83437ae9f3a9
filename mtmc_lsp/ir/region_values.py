"""Values of a set of nodes: those that others read, those that it has to compute or load, and those that are equal."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from mtmc_lsp.core.dtypes import is_low_precision
from mtmc_lsp.core.graph import Ref
from mtmc_lsp.ir.primitives import VIEW_OPS, KernelIR, Prim, PrimOp, ProductDims, is_zero_padding

MOST_SIBLINGS = 3
"""Most products of one kernel: queries, keys and values."""


def used_outside(ir: KernelIR, nodes: Iterable[str]) -> tuple[Ref, ...]:
    """Values of ``nodes`` that other nodes read or the target returns, in execution order."""
    graph = ir.graph
    inside = {name for name in nodes if name in graph.named}
    used: list[Ref] = []
    for name in sorted(inside, key=graph.positions.__getitem__):
        read = {ref for node in graph.readers(name) if node.name not in inside for ref in node.inputs()}
        outputs = [Ref(name, i) for i in range(len(graph.node(name).outputs))]
        used += [ref for ref in outputs if ref in read or ref in graph.escaping]
    return tuple(used)


def needed_primitives(ir: KernelIR, chosen: set[str], roots: list[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Primitives of the region that ``roots`` need, and the primitives that they load from outside.

    Positions, and views of them, are index arithmetic: each kernel computes those that it needs. So is a number in a tensor
    without dimensions.
    """
    needed: set[str] = set()
    outside: set[str] = set()
    pending = list(roots)
    while pending:
        name = pending.pop()
        if name in needed or name in outside:
            continue
        prim = ir.prims[name]
        if prim.op is PrimOp.INPUT or (prim.origin not in chosen and not _is_in_no_memory(ir.prims, name)):
            outside.add(name)
            continue
        needed.add(name)
        pending.extend(prim.inputs)
    position = ir.positions
    return tuple(sorted(needed, key=position.__getitem__)), tuple(sorted(outside, key=position.__getitem__))


def _is_in_no_memory(prims: Mapping[str, Prim], name: str) -> bool:
    while prims[name].op in (PrimOp.RESHAPE, PrimOp.EXPAND, PrimOp.PERMUTE):
        name = prims[name].inputs[0]
    prim = prims[name]
    is_number = prim.op is PrimOp.CONSTANT and not prim.shape and isinstance(prim.attrs["value"], (bool, int, float))
    return prim.op is PrimOp.IOTA or is_number


def is_in_memory(prims: Mapping[str, Prim], name: str, inputs: Collection[str]) -> bool:
    """Whether a value is in memory, possibly padded with zeros or viewed."""
    while name not in inputs:
        prim = prims[name]
        if prim.op not in VIEW_OPS and not is_zero_padding(prim):
            return False
        name = prim.inputs[0]
    return True


def are_siblings(prims: Mapping[str, Prim], products: Sequence[Prim]) -> bool:
    """Whether 16-bit products have one left operand and equal sizes, so that one kernel can load that operand once for all."""
    first = products[0]
    return len(products) <= MOST_SIBLINGS and all(
        len(each.inputs) == 2
        and is_low_precision(prims[each.inputs[0]].dtype)
        and not ProductDims.of(each).kernel_positions
        and (each.shape, each.dtype, ProductDims.of(each)) == (first.shape, first.dtype, ProductDims.of(first))
        and is_same_value(prims, each.inputs[0], first.inputs[0])
        for each in products
    )


def is_same_value(prims: Mapping[str, Prim], left: str, right: str) -> bool:
    """Whether two primitives are equal by their operations and sources."""
    a, b = prims[left], prims[right]
    if left == right:
        return True
    if a.op is not b.op or a.op not in (*VIEW_OPS, PrimOp.POINTWISE, PrimOp.CONSTANT):
        return False
    is_alike = (a.shape, a.dtype, a.attrs, len(a.inputs)) == (b.shape, b.dtype, b.attrs, len(b.inputs))
    return is_alike and all(is_same_value(prims, x, y) for x, y in zip(a.inputs, b.inputs, strict=True))
