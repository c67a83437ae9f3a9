"""Loops over time steps as generated kernels: the body of a loop as one region.

Iterations run one after another. The elements of the state that no operation of the body combines are independent: a program
instance holds some of them in registers and runs all iterations, so the launch has no barrier. Reductions in the body run inside
a program instance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mtmc_lsp.core.dtypes import itemsize
from mtmc_lsp.core.graph import Graph, Node, TensorType
from mtmc_lsp.core.loop import Loop, LoopInput
from mtmc_lsp.core.sizes import Size, product
from mtmc_lsp.ir.primitives import KernelIR, Prim, PrimOp
from mtmc_lsp.ir.regions import VIEWS, Region

POINTWISE = frozenset(
    {PrimOp.POINTWISE, PrimOp.RESHAPE, PrimOp.PERMUTE, PrimOp.EXPAND, PrimOp.ALIAS, PrimOp.REDUCE, PrimOp.CONSTANT}
)
"""Primitives that read a state at the position at which a program instance holds it."""


@dataclass(frozen=True)
class LoopForm:
    """A loop with its body in primitive form."""

    loop: Loop
    ir: KernelIR
    region: Region

    def prim(self, item: LoopInput) -> str:
        """The primitive of an input of the body."""
        return self.ir.values[item.name, 0]


def loop_form(prim: Prim) -> LoopForm:
    """The loop of a ``LOOP`` primitive."""
    form = prim.attrs["form"]
    assert isinstance(form, LoopForm)
    return form


def loop_in(ir: KernelIR, region: Region) -> LoopForm:
    """The loop of a region of one."""
    return loop_form(next(prim for name in region.prims if (prim := ir.prims[name]).op is PrimOp.LOOP))


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
