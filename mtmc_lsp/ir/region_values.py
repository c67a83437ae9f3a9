"""Values of a set of nodes: those that others read, and those that it has to compute or load."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from mtmc_lsp.core.graph import Ref
from mtmc_lsp.ir.primitives import VIEW_OPS, KernelIR, Prim, PrimOp, is_zero_padding


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
    """Primitives of the region that ``roots`` need, and the primitives that they load from outside."""
    needed: set[str] = set()
    outside: set[str] = set()
    pending = list(roots)
    while pending:
        name = pending.pop()
        if name in needed or name in outside:
            continue
        prim = ir.prims[name]
        if prim.op is PrimOp.INPUT or prim.origin not in chosen:
            outside.add(name)
            continue
        needed.add(name)
        pending.extend(prim.inputs)
    position = ir.positions
    return tuple(sorted(needed, key=position.__getitem__)), tuple(sorted(outside, key=position.__getitem__))


def is_in_memory(prims: Mapping[str, Prim], name: str, inputs: Collection[str]) -> bool:
    """Whether a value is in memory, possibly padded with zeros or viewed."""
    while name not in inputs:
        prim = prims[name]
        if prim.op not in VIEW_OPS and not is_zero_padding(prim):
            return False
        name = prim.inputs[0]
    return True
