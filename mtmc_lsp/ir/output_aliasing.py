"""Decides when a kernel may store a result over one of its operands: as an in-place operation does, or to save memory."""

from __future__ import annotations

from collections.abc import Set

from mtmc_lsp.core.graph import PRODUCTS, Mutation, Ref
from mtmc_lsp.ir.primitives import KernelIR, PrimOp
from mtmc_lsp.ir.regions import VIEWS, Region, RegionKind


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
    if region.sums:
        # A second launch stores the sums, and may read inputs.
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


def replaced_product(ir: KernelIR, region: Region, result: Ref, done: Set[str]) -> Ref | None:
    """The product that a result of a kernel may overwrite to save memory, because nothing reads it afterwards.

    Args:
        done: the nodes that run before the kernel.
    """
    for source in region.inputs:
        node = ir.graph.named.get(ir.prims[source].origin)
        if node is not None and node.word in PRODUCTS and node.name in done:
            product = Ref(node.name)
            if _may_replace(ir, region, product, result, done):
                return product
    return None


def _may_replace(ir: KernelIR, region: Region, operand: Ref, result: Ref, done: Set[str]) -> bool:
    """Whether a kernel over rows may store a result over an operand that nothing reads afterwards.

    One program instance reads and writes a row, and stores element i of the result after it loaded element i of the operand.
    This holds if both have the same type, the result depends on the operand, and each value of the operand's size is used at its
    index or reduced along the row: reductions end before the results are stored.
    """
    graph = ir.graph
    kind = graph.type_of(operand)
    is_same = graph.type_of(result) == kind and kind.is_contiguous
    if region.kind is not RegionKind.REDUCE or not is_same or region.parts or region.sums or operand in graph.escaping:
        return False
    if not _used_inside(ir, operand.name, done | set(region.nodes)):
        return False
    old, new = ir.of(operand).name, ir.of(result).name
    if set(region.table.all_axes(new)) != set(region.table.all_axes(old)):
        return False
    by_index = {old}
    for name in region.prims:
        prim = ir.prims[name]
        if not by_index & set(prim.inputs):
            continue
        if prim.op is PrimOp.POINTWISE and prim.shape == kind.shape:
            by_index.add(name)
        elif prim.op is not PrimOp.REDUCE or any(size != prim.shape[i] for i, size in enumerate(kind.shape[:-1])):
            return False
    return new in by_index


def _used_inside(ir: KernelIR, node: str, inside: Set[str]) -> bool:
    """Whether all readers of a node are among these nodes; a view counts as its readers."""
    for reader in ir.graph.readers(node):
        if reader.name not in inside:
            is_view = reader.op.split(".")[1] in VIEWS
            if not is_view or Ref(reader.name) in ir.graph.escaping or not _used_inside(ir, reader.name, inside):
                return False
    return True
