"""Loops over time steps as generated kernels: the body of a loop as one region.

Iterations run one after another. The elements of the state that no operation of the body combines are independent: a program
instance holds some of them in registers and runs all iterations, so the launch has no barrier. Reductions in the body run inside
a program instance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mtmc_lsp.core.dtypes import itemsize
from mtmc_lsp.core.graph import Graph, Node, Ref, TensorType
from mtmc_lsp.core.loop import Loop, LoopInput
from mtmc_lsp.core.sizes import Size, product
from mtmc_lsp.ir.primitives import KernelIR, PrimOp
from mtmc_lsp.ir.regions import VIEWS, CannotFuse, Region, RegionKind, analyse

POINTWISE = frozenset(
    {PrimOp.POINTWISE, PrimOp.RESHAPE, PrimOp.PERMUTE, PrimOp.EXPAND, PrimOp.ALIAS, PrimOp.REDUCE, PrimOp.CONSTANT}
)
"""Primitives that read a state at the position at which a program instance holds it."""


@dataclass(frozen=True)
class LoopForm:
    """A loop with its body in primitive form."""

    node: Node
    """The loop, with the operations around it that its kernel contains as part of its body."""
    results: tuple[Ref, ...]
    """The values of the graph that the outputs of the node are."""
    ir: KernelIR
    """Of the body."""
    region: Region
    """All of the body."""

    @property
    def loop(self) -> Loop:
        """The loop."""
        assert self.node.loop is not None
        return self.node.loop

    def prim(self, item: LoopInput) -> str:
        """The primitive of an input of the body."""
        return self.ir.values[item.name, 0]

    def chain(self) -> tuple[str, ...]:
        """Computed primitives between a state and its next value: an iteration waits for those of the one before."""
        following = {self.ir.of(item.next).name for item in self.loop.states if item.next is not None}
        after = {self.prim(item) for item in self.loop.states}
        for name in self.region.prims:
            if after & set(self.ir.prims[name].inputs):
                after.add(name)
        before: set[str] = set()
        for name in reversed(self.region.prims):
            if name in following | before:
                before |= {name, *self.ir.prims[name].inputs}
        return tuple(name for name in self.region.prims if name in after and name in before)

    def invariant(self) -> tuple[str, ...]:
        """Computed primitives that are the same in all iterations and that others read, in execution order."""
        varying = {self.prim(item) for item in self.loop.inputs if item.is_state or item.position is not None}
        needed: set[str] = set()
        for name in self.region.prims:
            inputs = self.ir.prims[name].inputs
            if varying & set(inputs):
                varying.add(name)
                needed |= set(inputs) - varying
        return tuple(name for name in self.region.prims if name in needed and name not in varying)


def loop_form(node: Node, graph: Graph, results: tuple[Ref, ...]) -> LoopForm:
    """The body of a loop as one region.

    Raises:
        CannotFuse: no kernel can run it step by step; the message says why.
    """
    from mtmc_lsp.ir.loops.blocks import block_form
    from mtmc_lsp.ir.loops.cells import cell_form, has_products
    from mtmc_lsp.ir.lower import lower_once

    assert node.loop is not None
    ir = lower_once(node.loop.body(graph))
    if opaque := sorted(ir.opaque):
        raise CannotFuse(f"{ir.graph.node(opaque[0]).op} in the loop stays a torch call")
    try:
        return cell_form(node, results, ir) if has_products(ir) else _tile_form(node, results, ir)
    except CannotFuse as reason:
        try:
            return block_form(node, results, ir)
        except CannotFuse:
            try:
                return _tile_form(node, results, ir, repeats=True)
            except CannotFuse:
                raise reason from None


def _tile_form(node: Node, results: tuple[Ref, ...], ir: KernelIR, repeats: bool = False) -> LoopForm:
    """A body that combines no elements of a state, or reduces them along the same axes.

    Args:
        repeats: whether states may lack axes of other states, so that several program instances compute the same ones.

    Raises:
        CannotFuse: it is of another form; the message says why.
    """
    assert node.loop is not None
    states = {ir.of(item.next).name for item in node.loop.states if item.next is not None}
    region = analyse(ir, ir.graph.named, repeated=states if repeats else ())
    if region.kind not in (RegionKind.MAP, RegionKind.REDUCE) or region.parts or region.sums:
        raise CannotFuse("the body of the loop is neither elementwise nor a reduction")
    form = LoopForm(node, results, ir, region)
    if any(ir.prims[name].op is PrimOp.RANDOM for name in region.prims):
        raise CannotFuse("the loop draws random numbers")
    held = {form.prim(item) for item in node.loop.states}
    for name in region.prims:
        prim = ir.prims[name]
        if held & set(prim.inputs):
            if prim.op not in POINTWISE:
                raise CannotFuse("an iteration of the loop reads neighbouring elements of its state")
            held.add(name)
    for item in form.loop.states:
        if item.next is not None and (state := form.prim(item)) in region.inputs:
            following = ir.of(item.next).name
            dims = range(len(ir.prims[state].shape))
            if any(region.table.axes(state, dim) != region.table.axes(following, dim) for dim in dims):
                raise CannotFuse("an iteration of the loop moves elements of its state")
    return form


def row_type(kind: TensorType, dim: int) -> TensorType:
    """The slice of length 1 of a tensor along a dimension."""
    shape = tuple(Size.of(1) if d == dim else size for d, size in enumerate(kind.shape))
    return TensorType(shape, kind.dtype, kind.stride)


def moved_bytes(node: Node, graph: Graph) -> float:
    """Bytes that all iterations read and write, if states stay in registers."""
    assert node.loop is not None
    count, total = node.loop.count.value(graph.sizes), 0.0
    for item in node.loop.inputs:
        if not item.is_index and item.argument is not None:
            total += _bytes(item.type, graph) * (count if item.position is not None else 1)
    for output, kind in zip(node.loop.outputs, node.outputs, strict=True):
        rows = kind.shape[output.position.dim].value(graph.sizes) if output.position is not None else 1
        total += _bytes(kind, graph) / max(1, rows) * (count if output.position is not None else 1)
    return total


def working_nodes(loop: Loop) -> Iterator[Node]:
    """The nodes of the body that launch a kernel in eager mode."""
    return (node for node in loop.nodes if node.op.split(".")[1] not in VIEWS)


def independent_elements(form: LoopForm) -> int:
    """Elements of the state that are computed without each other, times those that a reduction combines."""
    axes = (*form.region.parallel_axes, *form.region.reduced_axes)
    return product([axis.size for axis in axes]).value(form.ir.graph.sizes)


def _bytes(kind: TensorType, graph: Graph) -> float:
    sizes = [size for size, step in zip(kind.shape, kind.stride, strict=True) if step.terms or size == Size.of(1)]
    return float(itemsize(kind.dtype) * product(sizes).value(graph.sizes))
