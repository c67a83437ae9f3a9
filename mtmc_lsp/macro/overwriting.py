"""When a kernel may write a result into the input that it replaces, as the target's in-place operations do."""

from __future__ import annotations

from mtmc_lsp.core.graph import Mutation
from mtmc_lsp.macro.prims import PrimOp, Program
from mtmc_lsp.macro.regions import Region, RegionKind


def may_overwrite(program: Program, region: Region, mutation: Mutation) -> bool:
    """Whether an elementwise kernel may store the new value of an input where the old one lies.

    Element i of the old value must be read by the program and lane that store element i of the new one, and before they
    store it. That is so when

    - nothing but the kernel reads the old value, so none of it is wanted afterwards;
    - every primitive that depends on the old value is pointwise and all results have its shape, so it is read at the
      element's own place, once, by one program;
    - the new value depends on the old one, so its store waits for that load; or the old one is not read at all;
    - both lie in memory alike.
    """
    graph = program.graph
    item = next(each for each in graph.inputs if each.name == mutation.input)
    if region.kind is not RegionKind.MAP or graph.type_of(mutation.value) != item.type:
        return False
    old = program.values[item.name, 0]
    # In a kernel, an operation may be given a tensor and look at its shape alone; a torch call counts as a reader.
    given_to = {node.name for node in graph.nodes if any(ref.name == item.name for ref in node.inputs())}
    readers = {prim.origin for prim in program.prims.values() if old in prim.inputs}
    if not (readers | given_to) <= set(region.nodes) or any(
        program.of(ref).shape != item.type.shape for ref in region.outputs
    ):
        return False
    depends = {old}
    for name in region.prims:
        prim = program.prims[name]
        if depends & set(prim.inputs):
            if prim.op is not PrimOp.POINTWISE:
                return False
            depends.add(name)
    return not readers or program.of(mutation.value).name in depends
