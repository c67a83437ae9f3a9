"""Decides when a kernel may store a result into the input that it replaces, as an in-place operation does."""

from __future__ import annotations

from collections.abc import Set

from mtmc_lsp.core.graph import Mutation, Ref
from mtmc_lsp.ir.primitives import KernelIR, PrimOp
from mtmc_lsp.ir.regions import Region, RegionKind


def may_overwrite(ir: KernelIR, region: Region, mutation: Mutation, recomputed: Set[str] = frozenset()) -> bool:
    """Whether a kernel may store the new value of an input over the old one.

    The program instance and lane that store element i of the new value must be the only readers of element i of the old
    value, and must load it before the store. This holds if

    - only the kernel reads the old value, so nothing needs it afterwards;
    - every primitive that depends on the old value is pointwise and has the same shape, so each element is read once, at its
      index, by one program instance: in an elementwise kernel all results have that shape; in a row reduction the value has
      one element per row, and one program instance stores the results of a row after everything else;
    - the new value depends on the old one, so its store waits for that load, or the old value is not read at all;
    - both have the same memory layout.

    Args:
        recomputed: nodes that other kernels also recompute, so these kernels read the inputs of the nodes too.
    """
    graph = ir.graph
    kind = graph.type_of(Ref(mutation.input))
    if region.kind not in (RegionKind.MAP, RegionKind.REDUCE) or graph.type_of(mutation.value) != kind:
        return False
    if region.parts:
        # One part may be stored before another is loaded.
        return False
    old = ir.values[mutation.input, 0]
    # A node may receive a tensor and use only its shape; a torch call still counts as a reader.
    receivers = {node.name for node in graph.readers(mutation.input)}
    readers = {prim.origin for prim in ir.prims.values() if old in prim.inputs}
    if not (readers | receivers) <= set(region.nodes) - recomputed:
        return False
    new = ir.of(mutation.value).name
    if region.kind is RegionKind.MAP:
        has_same_elements = all(ir.of(ref).shape == kind.shape for ref in region.outputs)
    else:
        has_same_elements = set(region.table.all_axes(new)) == set(region.parallel_axes)
    if not has_same_elements:
        return False
    depends = {old}
    for name in region.prims:
        prim = ir.prims[name]
        if depends & set(prim.inputs):
            if prim.op is not PrimOp.POINTWISE or prim.shape != kind.shape:
                return False
            depends.add(name)
    return not readers or new in depends
