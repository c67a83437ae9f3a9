"""Loops whose iterations combine the elements of a small block of the state in any way, such as Viterbi, CTC or Sinkhorn.

A program instance holds a whole block of the state for one element of the batch: all axes that some operation reduces, shifts,
transposes or multiplies. Only axes that no operation combines are split among program instances.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from mtmc_lsp.core.graph import Node, Ref
from mtmc_lsp.core.loop import MOST_BLOCK
from mtmc_lsp.ir.axes import Axis, AxisTable
from mtmc_lsp.ir.loops.form import LoopForm
from mtmc_lsp.ir.primitives import KernelIR, Prim, PrimOp
from mtmc_lsp.ir.region_values import needed_primitives, used_outside
from mtmc_lsp.ir.regions import CannotFuse, Region, RegionKind

SUPPORTED = frozenset(
    {
        PrimOp.POINTWISE,
        PrimOp.CONSTANT,
        PrimOp.IOTA,
        PrimOp.ALIAS,
        PrimOp.EXPAND,
        PrimOp.RESHAPE,
        PrimOp.PERMUTE,
        PrimOp.SLICE,
        PrimOp.FLIP,
        PrimOp.CAT,
        PrimOp.PAD,
        PrimOp.REDUCE,
        PrimOp.SCAN,
        PrimOp.MATMUL,
    }
)
"""Primitives that a block can compute."""
SCANS = frozenset({"sum", "prod", "max", "min"})
"""Running reductions that a block can compute."""
MOST_TERMS = 2 * MOST_BLOCK
"""Elements of the largest tile of products that are summed."""


@dataclass(frozen=True)
class BlockForm(LoopForm):
    """A loop whose program instances hold whole blocks of the state."""

    inside: frozenset[Axis]
    """The axes of the body that a block holds."""

    def layout(self, name: str) -> tuple[tuple[int, Axis], ...]:
        """The axes of a primitive that a block holds, outermost first, each with its dimension."""
        shape = self.ir.prims[name].shape
        axes = ((dim, axis) for dim in range(len(shape)) for axis in self.region.table.axes(name, dim))
        return tuple((dim, axis) for dim, axis in axes if axis in self.inside)

    def extent(self, axis: Axis) -> int:
        """The elements of an axis in a block: a power of two.

        For ``N - 1`` it is the block of ``N``, so that both hold for the same values of ``N``.
        """
        sizes = self.ir.graph.sizes
        widest = {name: _power_of_two(value) for name, value in sizes.items()}
        return _power_of_two(max(axis.size.value(sizes), axis.size.value(widest)))

    def elements(self, name: str) -> int:
        """The elements of the block of a primitive."""
        count = 1
        for _, axis in self.layout(name):
            count *= self.extent(axis)
        return count

    def terms(self, prim: Prim) -> int:
        """The elements of the largest tile that a primitive is computed from; of a product, its terms."""
        if prim.op is not PrimOp.MATMUL:
            return self.elements(prim.name)
        count = self.elements(prim.name)
        for axis in self.region.table.of_product(prim).k:
            count *= self.extent(axis)
        return count

    @cached_property
    def largest(self) -> int:
        """The elements of the largest block of an iteration."""
        return max((self.elements(name) for name in (*self.region.prims, *self.region.inputs)), default=1)

    def exchanges(self) -> Iterator[Prim]:
        """The primitives of an iteration that move elements between threads."""
        moving = (PrimOp.REDUCE, PrimOp.SCAN, PrimOp.MATMUL, PrimOp.SLICE, PrimOp.FLIP, PrimOp.CAT, PrimOp.PAD)
        return (prim for name in self.region.prims if (prim := self.ir.prims[name]).op in moving)

    def is_view_of_memory(self, prim: Prim) -> bool:
        """Whether the primitive is a part of a tensor in memory, which is loaded instead of taken from a block."""
        return _is_view_of_memory(prim, set(self.region.inputs), {self.prim(item) for item in self.loop.states})


def _power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


def block_form(node: Node, results: tuple[Ref, ...], ir: KernelIR) -> BlockForm:
    """A body as operations on blocks.

    Raises:
        CannotFuse: a program instance cannot hold its blocks; the message says why.
    """
    assert node.loop is not None
    outputs = used_outside(ir, ir.graph.named)
    roots = [ir.of(ref).name for ref in outputs]
    prims, inputs = needed_primitives(ir, set(ir.graph.named), roots)
    members = [ir.prims[name] for name in prims]
    for prim in members:
        _check(prim)
    table = AxisTable(ir.prims, [*inputs, *prims], ir.graph.sizes)
    for item in node.loop.states:
        state = ir.values[item.name, 0]
        if item.next is not None and state in inputs:
            _tie(table, state, ir.of(item.next).name, len(ir.prims[state].shape))
    for prim in members:
        if prim.op is PrimOp.ALIAS:
            # The operand and the alias are one value, which the block holds once.
            _tie(table, prim.inputs[0], prim.name, len(prim.shape))
    held = {ir.values[item.name, 0] for item in node.loop.states}
    inside = frozenset(_inside(ir, members, inputs, held, table))
    parallel = tuple(dict.fromkeys(axis for root in roots for axis in table.all_axes(root) if axis not in inside))
    for root in roots:
        if set(parallel) - set(table.all_axes(root)):
            raise CannotFuse("the results of an iteration have different batch dimensions")
    region = Region(tuple(ir.graph.named), prims, inputs, outputs, RegionKind.LOOP, table, parallel, ())
    form = BlockForm(node, results, ir, region, inside)
    for name in (*inputs, *prims):
        if not set(table.all_axes(name)) <= inside | set(parallel):
            raise CannotFuse("an iteration of the loop reads elements of other batch dimensions")
        if form.elements(name) > MOST_BLOCK or form.terms(ir.prims[name]) > MOST_TERMS:
            raise CannotFuse(f"a block of the loop's state has more than {MOST_BLOCK} elements")
    for prim in members:
        _check_layout(form, prim)
    return form


def _check(prim: Prim) -> None:
    if prim.op not in SUPPORTED:
        raise CannotFuse(f"an iteration of the loop contains {prim.op.value}")
    if prim.op is PrimOp.SCAN and prim.fn not in SCANS:
        raise CannotFuse(f"an iteration of the loop contains a running {prim.fn}")
    if prim.op is PrimOp.MATMUL and len(prim.inputs) > 2:
        raise CannotFuse("an iteration of the loop contains a product of split operands")


def _tie(table: AxisTable, state: str, following: str, rank: int) -> None:
    """Make the axes of a state those of its next value."""
    for dim in range(rank):
        one, other = table.axes(state, dim), table.axes(following, dim)
        if len(one) != len(other) or any(a.size != b.size for a, b in zip(one, other, strict=True)):
            raise CannotFuse("an iteration of the loop changes the dimensions of its state")
        table.tie(one, other)


def _inside(
    ir: KernelIR, members: list[Prim], inputs: tuple[str, ...], held: set[str], table: AxisTable
) -> Iterator[Axis]:
    """The axes that an operation combines, or that a value has twice."""
    for name in (*inputs, *(prim.name for prim in members)):
        axes = table.all_axes(name)
        yield from (axis for axis in axes if axes.count(axis) > 1)
    for prim in members:
        if prim.op is PrimOp.MATMUL:
            yield from table.of_product(prim).k
        if _is_view_of_memory(prim, set(inputs), held):
            continue
        for dim in changed_dims(prim, ir):
            for name in (*prim.inputs, prim.name):
                yield from table.axes(name, dim)


def changed_dims(prim: Prim, ir: KernelIR) -> tuple[int, ...]:
    """The dimensions along which an operation combines or moves elements."""
    if prim.op is PrimOp.REDUCE or prim.op is PrimOp.FLIP:
        dims = prim.attrs["dims"]
        assert isinstance(dims, tuple)
        return dims
    if prim.op in (PrimOp.SCAN, PrimOp.SLICE, PrimOp.CAT, PrimOp.IOTA):
        return (int(str(prim.attrs["dim"])),)
    if prim.op is PrimOp.PAD:
        source = ir.prims[prim.inputs[0]].shape
        before = prim.attrs["before"]
        assert isinstance(before, tuple)
        return tuple(dim for dim, size in enumerate(prim.shape) if size != source[dim] or before[dim])
    return ()


def _is_view_of_memory(prim: Prim, inputs: set[str], held: set[str]) -> bool:
    return prim.op is PrimOp.SLICE and prim.inputs[0] in inputs - held


def _check_layout(form: BlockForm, prim: Prim) -> None:
    """Reject a reshape that merges or splits axes of a block, and a dimension of several axes that is cut."""
    if prim.op is PrimOp.RESHAPE:
        before, after = form.layout(prim.inputs[0]), form.layout(prim.name)
        if [axis for _, axis in before] != [axis for _, axis in after]:
            raise CannotFuse("an iteration of the loop reshapes a block of its state")
    needs_one_axis = prim.op in (PrimOp.SCAN, PrimOp.SLICE, PrimOp.CAT, PrimOp.FLIP, PrimOp.PAD, PrimOp.IOTA)
    if needs_one_axis or prim.fn.startswith("arg"):
        for dim in changed_dims(prim, form.ir):
            for name in (*prim.inputs, prim.name):
                if len(form.region.table.axes(name, dim)) > 1:
                    raise CannotFuse("an iteration of the loop cuts a dimension that it also reshapes")
