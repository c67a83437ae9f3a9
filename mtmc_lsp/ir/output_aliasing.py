"""When a kernel may write a result into the input that it replaces, as the target's in-place operations do."""

from __future__ import annotations

from collections.abc import Set

from mtmc_lsp.core.graph import Mutation, Ref
from mtmc_lsp.ir.primitives import KernelIR, PrimOp
from mtmc_lsp.ir.regions import Region, RegionKind


def may_overwrite(ir: KernelIR, region: Region, mutation: Mutation, recomputed: Set[str] = frozenset()) -> bool:
    """Whether a kernel may store the new value of an input where the old one lies.

    Element i of the old value must be read by the program and lane that store element i of the new one, and before they
    store it. That is so when

    - nothing but the kernel reads the old value, so none of it is wanted afterwards;
    - every primitive that depends on the old value is pointwise and has its shape, so it is read at the element's own place,
      once, by one program: in an elementwise kernel all results have that shape; in one that reduces rows the value has one
      element for each row, and a row's own results are stored by one of its programs, after all else;
    - the new value depends on the old one, so its store waits for that load; or the old one is not read at all;
    - both lie in memory alike.

    Args:
        program: what is computed.
        region: the kernel.
        mutation: the input and its new value.
        recomputed: nodes that other kernels compute for themselves as well, so that these read what the nodes read.
    """
    graph = ir.graph
    kind = graph.type_of(Ref(mutation.input))
    if region.kind not in (RegionKind.MAP, RegionKind.REDUCE) or graph.type_of(mutation.value) != kind:
        return False
    if region.parts:
        # One part may be written before another is read.
        return False
    old = ir.values[mutation.input, 0]
    # In a kernel, an operation may be given a tensor and look at its shape alone; a torch call counts as a reader.
    given_to = {node.name for node in graph.readers(mutation.input)}
    readers = {prim.origin for prim in ir.prims.values() if old in prim.inputs}
    if not (readers | given_to) <= set(region.nodes) - recomputed:
        return False
    new = ir.of(mutation.value).name
    if region.kind is RegionKind.MAP:
        one_place = all(ir.of(ref).shape == kind.shape for ref in region.outputs)
    else:
        one_place = set(region.table.all_axes(new)) == set(region.kept)
    if not one_place:
        return False
    depends = {old}
    for name in region.prims:
        prim = ir.prims[name]
        if depends & set(prim.inputs):
            if prim.op is not PrimOp.POINTWISE or prim.shape != kind.shape:
                return False
            depends.add(name)
    return not readers or new in depends
