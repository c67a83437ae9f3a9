"""What a set of ATen nodes is as one kernel: what it reads and writes, and along which axes it loops and reduces."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from mtmc_lsp.core.graph import Graph, Ref, TensorType
from mtmc_lsp.core.sizes import Size, product
from mtmc_lsp.ir.attention_pattern import attention_form
from mtmc_lsp.ir.axes import Axis, AxisTable
from mtmc_lsp.ir.concat_outputs import Parts, indices, parts_of, stored
from mtmc_lsp.ir.primitives import ONE, VIEW_OPS, KernelIR, Prim, PrimOp, ProductDims, is_zero_padding

VIEWS = frozenset(
    "view reshape permute transpose t unsqueeze squeeze expand slice select split split_with_sizes unbind chunk alias detach "
    "_unsafe_view narrow diagonal unfold unsafe_split unsafe_split_with_sizes "
    "atleast_1d atleast_2d atleast_3d".split()
)
"""ATen operations that only make another view of a tensor (a reshape may copy; the model neglects it)."""


class CannotFuse(Exception):
    """These nodes are not one kernel; the message says why, for people."""


class RegionKind(Enum):
    """The kernel shape that a region needs."""

    MAP = "map"
    """Elementwise over one set of axes."""
    REDUCE = "reduce"
    """Elementwise work around reductions that all run over the same axes."""
    SCAN = "scan"
    MATMUL = "matmul"
    ATTENTION = "attention"
    RECURRENT = "recurrent"
    """Recurrent layers, one launch for each group of steps that do not wait for one another."""


PRODUCTS = frozenset({RegionKind.MATMUL, RegionKind.ATTENTION})


@dataclass(frozen=True)
class Region:
    """A set of ATen nodes as one kernel."""

    nodes: tuple[str, ...]
    prims: tuple[str, ...]
    """The primitives that are computed, in execution order; those nobody needs are left out."""
    inputs: tuple[str, ...]
    """Primitives that are read from memory."""
    outputs: tuple[Ref, ...]
    """ATen values that are written to memory."""
    kind: RegionKind
    table: AxisTable
    kept: tuple[Axis, ...]
    """Axes of independent work, outermost first."""
    reduced: tuple[Axis, ...]
    """Axes that are reduced (or scanned) over, outermost first."""
    parts: Parts = field(default_factory=dict, hash=False)
    """Results that are written part by part, and these parts."""

    def stored(self, ir: KernelIR) -> list[tuple[Ref, str]]:
        """What is written, each result with its primitive; with several where these are its parts."""
        return list(stored(ir, self.outputs, self.parts))

    def roots(self, ir: KernelIR) -> list[str]:
        """The primitives that are asked for: what is written, and where."""
        return [*(name for _, name in self.stored(ir)), *indices(self.parts)]

    @property
    def rows(self) -> Size:
        """Number of independent pieces of work."""
        return product([axis.size for axis in self.kept])

    @property
    def columns(self) -> Size:
        """Number of elements reduced for each."""
        return product([axis.size for axis in self.reduced])


def is_product(region: Region) -> bool:
    """Whether the kernel is one around matrix products."""
    return region.kind in PRODUCTS


def product_in(ir: KernelIR, region: Region) -> Prim:
    """The first matrix product of a region that has one."""
    return next(prim for name in region.prims if (prim := ir.prims[name]).op is PrimOp.MATMUL)


def used_outside(ir: KernelIR, nodes: Iterable[str]) -> tuple[Ref, ...]:
    """Values made by ``nodes`` that other nodes read or the target returns, in execution order."""
    graph = ir.graph
    inside = {name for name in nodes if name in graph.named}
    found: list[Ref] = []
    for name in sorted(inside, key=graph.positions.__getitem__):
        read = {ref for node in graph.readers(name) if node.name not in inside for ref in node.inputs()}
        outputs = [Ref(name, i) for i in range(len(graph.node(name).outputs))]
        found += [ref for ref in outputs if ref in read or ref in graph.escaping]
    return tuple(found)


def _is_expanded(kind: TensorType) -> bool:
    return any(not step.terms and size != Size.of(1) for size, step in zip(kind.shape, kind.stride, strict=True))


def _returned_views(graph: Graph) -> set[Ref]:
    """Values on the way from an input to a result that is a view of it."""
    nodes = graph.named
    found: set[Ref] = set()
    for returned in graph.outputs:
        ref: Ref = returned
        chain: set[Ref] = set()
        while ref.name in nodes and nodes[ref.name].op.split(".")[1] in VIEWS:
            chain.add(ref)
            ref = next(nodes[ref.name].inputs())
        if ref.name not in nodes:
            found |= chain
    return found


def analyse(ir: KernelIR, nodes: Iterable[str], recomputed: Iterable[str] = ()) -> Region:
    """The region that ``nodes`` make.

    Args:
        program: what they are nodes of.
        nodes: computed here, and written where others read them.
        recomputed: computed here for ``nodes`` alone; others compute these values for themselves.

    Raises:
        CannotFuse: they are not one kernel.
    """
    own = set(nodes)
    chosen = own | set(recomputed)
    positions = ir.graph.positions
    ordered = tuple(sorted((name for name in own if name in positions), key=positions.__getitem__))
    stuck = sorted((chosen & ir.opaque) & set(positions), key=positions.__getitem__)
    if stuck:
        raise CannotFuse(f"{ir.graph.node(stuck[0]).op} stays a torch call")
    _check_convex(ir, own, chosen)
    outputs = used_outside(ir, ordered)
    if not outputs:
        raise CannotFuse("nothing of it is used")
    parts = parts_of(ir, outputs, chosen)
    try:
        return _analysed(ir, ordered, chosen, outputs, parts)
    except CannotFuse:
        if not parts:
            raise
        return _analysed(ir, ordered, chosen, outputs, {})


def _analysed(
    ir: KernelIR, ordered: tuple[str, ...], chosen: set[str], outputs: tuple[Ref, ...], parts: Parts
) -> Region:
    written = list(stored(ir, outputs, parts))
    results = [name for _, name in written]
    prims, inputs = _needed(ir, chosen, [*results, *indices(parts)])
    if any(ir.prims[name].op is PrimOp.ADD_AT for name in prims):
        raise CannotFuse("what rows are added to is read before all are")
    if any(ir.of(ref).name in prims for ref in parts):
        raise CannotFuse("a result is read before it is put together")
    added = [ir.of(ref).name for ref, own in parts.items() if own[0].index]
    if not prims and not added:
        raise CannotFuse("nothing is computed")
    if any(_is_expanded(ir.graph.type_of(ref)) for ref in outputs):
        raise CannotFuse("a result shows one element in many places")
    if set(outputs) & _returned_views(ir.graph):
        raise CannotFuse("a result is a view of an input, and a kernel would make a copy of it")
    members = [ir.prims[name] for name in prims]
    if any(prim.op is PrimOp.RECURRENT for prim in members):
        if len(ordered) > 1 or len(chosen) > 1:
            raise CannotFuse("recurrent layers are a kernel of their own")
        table = AxisTable(ir.prims, (), ir.graph.sizes)
        return Region(ordered, prims, inputs, outputs, RegionKind.RECURRENT, table, (), ())
    # A result that is an input as it is (a clone) has axes too.
    members_and_results = [*(name for name in results if name in inputs), *prims, *added]
    table = AxisTable(ir.prims, members_and_results, ir.graph.sizes)
    _check_distinct(members, table)
    kind = _kind(members)
    if parts and kind not in (RegionKind.MAP, RegionKind.REDUCE):
        raise CannotFuse("a result is put together of several")
    if kind in (RegionKind.MATMUL, RegionKind.ATTENTION):
        return _product_region(ir, ordered, prims, inputs, outputs, kind, table)
    _tie_passes(members, results, table)
    _check_distinct(members, table)
    reduced = _reduced_axes(members, table)
    kept = _kept_axes(ir, written, table, reduced, members)
    _check_members(members, table, kept, reduced)
    _check_single_places(members)
    _check_repetition(ir, members, results, table, kept)
    for name in results:
        axes = set(table.all_axes(name))
        if not set(kept) <= axes:
            raise CannotFuse("its results do not have the same independent axes")
        if axes & set(reduced) and not set(reduced) <= axes:
            raise CannotFuse("a result has only part of the reduced axes")
    return Region(ordered, prims, inputs, outputs, kind, table, kept, reduced, parts)


def _tie_passes(members: list[Prim], results: list[str], table: AxisTable) -> None:
    """Let reductions of several tensors, and results that only read what was reduced, run over the same rows and columns.

    In ``y * x.norm(dim=-1, keepdim=True)`` nothing ties the columns of y to those of x. A program that has reduced its row
    of x can write its row of y all the same.
    """
    passes = [prim for prim in members if prim.op in (PrimOp.REDUCE, PrimOp.SCAN)]
    for prim in passes[1:]:
        first, other = (reduction_axes(each, table) for each in (passes[0], prim))
        if not set(first) & set(other) and [axis.size for axis in first] == [axis.size for axis in other]:
            table.tie(first, other)
    for name in results if passes else []:
        first = reduction_axes(passes[0], table)
        walked = {axis for prim in passes for axis in table.all_axes(prim.inputs[0])}
        own = tuple(axis for axis in table.all_axes(name) if axis not in walked)
        if own and not set(first) & set(table.all_axes(name)) and [a.size for a in own] == [a.size for a in first]:
            table.tie(first, own)


FEW = 4
"""How often a reduction may be done again rather than written to memory."""


def _check_repetition(
    ir: KernelIR, members: list[Prim], results: list[str], table: AxisTable, kept: tuple[Axis, ...]
) -> None:
    """No program may reduce a whole row for one element of a result, when many elements need the same row."""
    for prim in members:
        if prim.op is not PrimOp.REDUCE or any(
            set(reduction_axes(prim, table)) & set(table.all_axes(n)) for n in results
        ):
            continue
        again = set(kept) - set(table.all_axes(prim.inputs[0]))
        if product([axis.size for axis in again]).value(ir.graph.sizes) > FEW:
            raise CannotFuse("a reduction would be done again for each element of a result")


def _check_distinct(members: list[Prim], table: AxisTable) -> None:
    """A value against its own transpose walks one axis twice, and so does one whose rows meet what its columns became.

    Either takes two sets of axes. What is read counts as well: the mean over the rows of a square matrix, beside the
    columns of another tensor, would be that of its diagonal.
    """
    for name in dict.fromkeys(each for prim in members for each in (*prim.inputs, prim.name)):
        axes = table.all_axes(name)
        if len(set(axes)) != len(axes):
            raise CannotFuse("a tensor meets itself along another axis")


def _check_convex(ir: KernelIR, own: set[str], chosen: set[str]) -> None:
    """No value may leave the region and come back: that needs the kernel to run twice.

    What is only recomputed does not leave: others that read it have it from elsewhere.
    """
    leaving: set[str] = set()
    outside: set[str] = set()
    graph = ir.graph
    places = [graph.positions[name] for name in chosen if name in graph.positions]
    # What lies on a way out of the region and back runs between its first node and its last.
    for node in graph.nodes[min(places, default=0) : max(places, default=-1) + 1]:
        sources = {ref.name for ref in node.inputs()}
        if node.name in chosen:
            if sources & outside:
                raise CannotFuse("a value would have to leave the kernel and come back")
            if node.name in own or sources & leaving:
                leaving.add(node.name)
        elif sources & (leaving | outside):
            outside.add(node.name)


def _needed(ir: KernelIR, chosen: set[str], roots: list[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Primitives of the region that ``roots`` need, and those they read from outside."""
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


def _kind(members: list[Prim]) -> RegionKind:
    ops = [prim.op for prim in members]
    if attention_form(members) is not None:
        return RegionKind.ATTENTION
    if ops.count(PrimOp.MATMUL) > 1:
        raise CannotFuse("two matrix products")
    if PrimOp.MATMUL in ops:
        if {PrimOp.REDUCE, PrimOp.SCAN, PrimOp.FOLD} & set(ops):
            raise CannotFuse("a reduction beside a matrix product")
        return RegionKind.MATMUL
    if PrimOp.SCAN in ops:
        if PrimOp.REDUCE in ops:
            raise CannotFuse("a reduction beside a scan")
        if ops.count(PrimOp.SCAN) > 1:
            raise CannotFuse("two scans")
        _check_read_in_place(members)
        return RegionKind.SCAN
    return RegionKind.REDUCE if PrimOp.REDUCE in ops else RegionKind.MAP


def _check_read_in_place(members: list[Prim]) -> None:
    """A scan's result is there for the block of columns at hand alone."""
    later: set[str] = set()
    for prim in members:
        if prim.op is PrimOp.SCAN or later & set(prim.inputs):
            later.add(prim.name)
        moved = prim.op in (PrimOp.SLICE, PrimOp.FLIP, PrimOp.CAT, PrimOp.PAD, PrimOp.GATHER, PrimOp.WINDOW)
        if moved and later & set(prim.inputs):
            raise CannotFuse("a scan's result is read at another place than its own")


def _check_single_places(members: list[Prim]) -> None:
    """What has been reduced is known at its own place, not as one of several that are put side by side."""
    shapes = {prim.name: prim.shape for prim in members}
    later: set[str] = set()
    for prim in members:
        if prim.op in (PrimOp.CAT, PrimOp.PAD, PrimOp.GATHER, PrimOp.WINDOW):
            moved = prim.inputs if prim.op is PrimOp.CAT else prim.inputs[:1]
            for name in later & set(moved):
                if any(own == ONE != made for own, made in zip(shapes[name], prim.shape, strict=False)):
                    raise CannotFuse("a reduction's result becomes one of several side by side")
        if prim.op is PrimOp.REDUCE or later & set(prim.inputs):
            later.add(prim.name)


def reduction_axes(prim: Prim, table: AxisTable) -> tuple[Axis, ...]:
    """The axes that a reduction or scan runs over, outermost first."""
    dims = prim.attrs["dims"] if prim.op is PrimOp.REDUCE else (prim.attrs["dim"],)
    assert isinstance(dims, tuple)
    return tuple(axis for dim in dims for axis in table.axes(prim.inputs[0], dim))


def _reduced_axes(members: list[Prim], table: AxisTable) -> tuple[Axis, ...]:
    found: tuple[Axis, ...] | None = None
    for prim in members:
        if prim.op in (PrimOp.REDUCE, PrimOp.SCAN):
            axes = reduction_axes(prim, table)
            if found is not None and set(axes) != set(found):
                raise CannotFuse("two reductions over different axes")
            found = axes if found is None else found
    return found or ()


def _kept_axes(
    ir: KernelIR,
    written: list[tuple[Ref, str]],
    table: AxisTable,
    reduced: tuple[Axis, ...],
    members: list[Prim],
) -> tuple[Axis, ...]:
    """The independent axes, ordered so that the last one lies densest in memory."""
    order: list[tuple[int, Axis]] = []
    seen: set[Axis] = set()
    sizes = ir.graph.sizes
    for ref, name in written:
        for dim, stride in enumerate(ir.graph.type_of(ref).stride):
            for place, axis in enumerate(reversed(table.axes(name, dim))):
                if axis not in seen and axis not in reduced:
                    seen.add(axis)
                    order.append((_weight(stride.value(sizes), place), axis))
    for prim in members:
        if prim.op in (PrimOp.REDUCE, PrimOp.SCAN):
            for axis in table.all_axes(prim.inputs[0]):
                if axis not in seen and axis not in reduced:
                    raise CannotFuse("a reduction has axes that its result lacks")
    return tuple(axis for _, axis in sorted(order, key=lambda item: -item[0]))


def _weight(stride: int, place: int) -> int:
    """Sort key: the memory stride of the dimension, then how far out the axis lies inside it."""
    return stride * 1024 + place


def _check_members(members: list[Prim], table: AxisTable, kept: tuple[Axis, ...], reduced: tuple[Axis, ...]) -> None:
    """Every primitive that is computed with its own indices must speak of the kernel's axes alone."""
    known = set(kept) | set(reduced)
    for prim in members:
        if prim.op is PrimOp.REDUCE and not set(table.all_axes(prim.inputs[0])) <= known:
            raise CannotFuse("a reduction over part of a tensor")


def _product_region(
    ir: KernelIR,
    nodes: tuple[str, ...],
    prims: tuple[str, ...],
    inputs: tuple[str, ...],
    outputs: tuple[Ref, ...],
    kind: RegionKind,
    table: AxisTable,
) -> Region:
    """A region around one matrix product: its results must have exactly the product's axes."""
    # Of an attention's two products the second gives the result.
    heavy = [ir.prims[name] for name in prims if ir.prims[name].op is PrimOp.MATMUL][-1]
    kept = table.all_axes(heavy.name)
    for ref in outputs:
        if set(table.all_axes(ir.of(ref).name)) != set(kept):
            raise CannotFuse("a result does not have the product's axes")
    depends, cropped = {heavy.name}, set[str]()
    for name in prims:
        prim = ir.prims[name]
        if depends & set(prim.inputs):
            depends.add(name)
            if prim.op not in (PrimOp.POINTWISE, PrimOp.RESHAPE, PrimOp.PERMUTE, PrimOp.EXPAND, PrimOp.CROP):
                raise CannotFuse("what follows the product is not elementwise")
            if prim.op is PrimOp.RESHAPE and cropped & set(prim.inputs):
                raise CannotFuse("a reshape of a part of a product")
            if prim.op is PrimOp.CROP or cropped & set(prim.inputs):
                cropped.add(name)
    dims = ProductDims.of(heavy)
    if dims.kernel_positions and not all(_is_read(ir.prims, name, inputs) for name in heavy.inputs):
        raise CannotFuse("what windows read would be computed again at each place of each window")
    left, first = heavy.inputs[0], dims.batch + dims.rows
    reduced = tuple(axis for dim in range(first, first + dims.summed) for axis in table.axes(left, dim))
    return Region(nodes, prims, inputs, outputs, kind, table, kept, reduced)


def _is_read(prims: Mapping[str, Prim], name: str, inputs: Collection[str]) -> bool:
    """Whether a value lies in memory, with zeros around it perhaps."""
    while name not in inputs:
        prim = prims[name]
        if prim.op not in VIEW_OPS and not is_zero_padding(prim):
            return False
        name = prim.inputs[0]
    return True


def lines_of(ir: KernelIR, nodes: Iterable[str]) -> tuple[int, int]:
    """First and last source line of ``nodes``; (0, 0) when unknown."""
    wanted = set(nodes)
    lines = [node.line for node in ir.graph.nodes if node.name in wanted and node.line]
    return (min(lines), max(lines)) if lines else (0, 0)
