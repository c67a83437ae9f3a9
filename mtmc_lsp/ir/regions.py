"""Analyses a set of ATen nodes as one kernel: its inputs and outputs, and the axes that it loops and reduces over."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from mtmc_lsp.core.graph import Graph, InputKind, Ref, TensorType
from mtmc_lsp.core.sizes import Size, product
from mtmc_lsp.ir.attention_pattern import (
    attention_form,
    gradient_form,
    join_tiles,
    why_no_gradients,
    why_not_attention,
)
from mtmc_lsp.ir.axes import Axis, AxisTable
from mtmc_lsp.ir.concat_outputs import Parts, output_parts_of, scatter_indices, stored_primitives
from mtmc_lsp.ir.primitives import BIJECTIVE_VIEWS, ONE, KernelIR, Prim, PrimOp, ProductDims
from mtmc_lsp.ir.reductions.column_sums import ColumnSums, column_sums
from mtmc_lsp.ir.region_values import are_siblings, is_in_memory, needed_primitives, used_outside

VIEWS = frozenset(
    "view reshape permute transpose t unsqueeze squeeze expand slice select split split_with_sizes unbind chunk alias detach "
    "_unsafe_view narrow diagonal unfold unsafe_split unsafe_split_with_sizes "
    "atleast_1d atleast_2d atleast_3d".split()
)
"""ATen operations that return a view of a tensor (a reshape may copy; the model neglects that)."""


class CannotFuse(Exception):
    """The nodes cannot form one kernel; the message tells the user why."""


class RegionKind(Enum):
    """The kernel shape that a region needs."""

    MAP = "map"
    """Elementwise over one set of axes."""
    REDUCE = "reduce"
    """Reductions that all run over the same axes, with elementwise operations."""
    SCAN = "scan"
    MATMUL = "matmul"
    ATTENTION = "attention"
    ATTENTION_GRADIENT = "attention-gradient"
    """Gradients of an attention, which compute its probabilities again tile by tile."""
    RECURRENT = "recurrent"
    """Recurrent layers, one launch for each group of independent steps."""
    LOOP = "loop"
    """A loop over time steps, one launch for all of them."""


PRODUCTS = frozenset({RegionKind.MATMUL, RegionKind.ATTENTION, RegionKind.ATTENTION_GRADIENT})


@dataclass(frozen=True)
class ColumnHalves:
    """How the halves of a product's columns are read."""

    whole: Axis
    """The product's columns."""
    axes: tuple[Axis, ...]
    """The columns of each half, outermost first."""
    length: Size
    """Columns of each half."""


@dataclass(frozen=True)
class Region:
    """A set of ATen nodes that forms one kernel."""

    nodes: tuple[str, ...]
    prims: tuple[str, ...]
    """The computed primitives, in execution order, without dead ones."""
    inputs: tuple[str, ...]
    """Primitives that the kernel loads."""
    outputs: tuple[Ref, ...]
    """ATen values that the kernel stores."""
    kind: RegionKind
    table: AxisTable
    parallel_axes: tuple[Axis, ...]
    """Axes of independent work, outermost first."""
    reduced_axes: tuple[Axis, ...]
    """Axes that are reduced or scanned over, outermost first."""
    parts: Parts = field(default_factory=dict, hash=False)
    """Outputs that are stored part by part, with their parts."""
    halves: ColumnHalves | None = None
    """For a product whose results are only read as two halves of columns, such as gate and up: how they are read."""
    sums: tuple[str, ...] = ()
    """Sums over all rows that the kernel of these rows computes too (:mod:`mtmc_lsp.ir.reductions.column_sums`)."""

    def stored(self, ir: KernelIR) -> list[tuple[Ref, str]]:
        """Pairs of an output and a primitive that is stored to it: one per output, or one per part."""
        return list(stored_primitives(ir, self.outputs, self.parts))

    def roots(self, ir: KernelIR) -> list[str]:
        """The primitives that the kernel must compute: stored values and the indices of scatter-adds."""
        return [*(name for _, name in self.stored(ir)), *scatter_indices(self.parts)]

    @property
    def rows(self) -> Size:
        """Product of the independent axes."""
        return product([axis.size for axis in self.parallel_axes])

    @property
    def columns(self) -> Size:
        """Product of the reduced axes."""
        return product([axis.size for axis in self.reduced_axes])


def is_product(region: Region) -> bool:
    """Whether the kernel contains matrix products."""
    return region.kind in PRODUCTS


def product_in(ir: KernelIR, region: Region) -> Prim:
    """The first matrix product of a region."""
    return products_in(ir, region)[0]


def products_in(ir: KernelIR, region: Region) -> tuple[Prim, ...]:
    """The matrix products of a region. Several products of one kernel have the same left operand and the same axes.

    A product whose halves of columns are read together counts as two products.
    """
    products = tuple(prim for name in region.prims if (prim := ir.prims[name]).op is PrimOp.MATMUL)
    return products if region.halves is None else products * 2


def _is_expanded(kind: TensorType) -> bool:
    return any(not step.terms and size != Size.of(1) for size, step in zip(kind.shape, kind.stride, strict=True))


def _returned_views(graph: Graph) -> set[Ref]:
    """Values on the path from an input to an output that is a view of that input."""
    nodes = graph.named
    view_refs: set[Ref] = set()
    for returned in graph.outputs:
        ref: Ref = returned
        chain: set[Ref] = set()
        while ref.name in nodes and nodes[ref.name].op.split(".")[1] in VIEWS:
            chain.add(ref)
            ref = next(nodes[ref.name].inputs())
        if ref.name not in nodes:
            view_refs |= chain
    return view_refs


def analyse(
    ir: KernelIR, nodes: Iterable[str], recomputed: Iterable[str] = (), repeated: Collection[str] = ()
) -> Region:
    """Analyse ``nodes`` as one kernel.

    Args:
        nodes: nodes that the kernel computes; it stores the values that other nodes read.
        recomputed: nodes that the kernel computes for internal use only; other kernels recompute them too.
        repeated: primitives of results that may lack independent axes: each program instance computes them again.

    Raises:
        CannotFuse: the nodes cannot form one kernel.
    """
    members = set(nodes)
    chosen = members | set(recomputed)
    positions = ir.graph.positions
    ordered = tuple(sorted((name for name in members if name in positions), key=positions.__getitem__))
    torch_calls = sorted((chosen & ir.opaque) & set(positions), key=positions.__getitem__)
    if not ir.graph.inputs:
        # For example the standard deviation of one element, which is NaN.
        raise CannotFuse("it reads no tensor, so nothing tells on which device it would run")
    if torch_calls:
        raise CannotFuse(f"{ir.graph.node(torch_calls[0]).op} stays a torch call")
    backward = chosen & ir.graph.backward_nodes
    if backward and backward != chosen:
        raise CannotFuse("the backward pass runs later than the forward pass")
    _check_convex(ir, members, chosen)
    outputs = used_outside(ir, ordered)
    if not outputs:
        raise CannotFuse("no other node and no output of the target uses its values")
    parts = output_parts_of(ir, outputs, chosen)
    try:
        return _region_of(ir, ordered, chosen, outputs, parts, repeated)
    except CannotFuse:
        if not parts:
            raise
        return _region_of(ir, ordered, chosen, outputs, {}, repeated)


def _region_of(
    ir: KernelIR,
    ordered: tuple[str, ...],
    chosen: set[str],
    outputs: tuple[Ref, ...],
    parts: Parts,
    repeated: Collection[str],
) -> Region:
    written = list(stored_primitives(ir, outputs, parts))
    results = [name for _, name in written]
    prims, inputs = needed_primitives(ir, chosen, [*results, *scatter_indices(parts)])
    if any(ir.prims[name].op is PrimOp.SCATTER_ADD for name in prims):
        raise CannotFuse("the result of a scatter-add is read before all rows are added")
    if any(ir.of(ref).name in prims for ref in parts):
        raise CannotFuse("a concatenated result is read before all of its parts are stored")
    added = [ir.of(ref).name for ref, parts_of_ref in parts.items() if parts_of_ref[0].index]
    if not prims and not added:
        raise CannotFuse("it computes nothing")
    if any(_is_expanded(ir.graph.type_of(ref)) for ref in outputs):
        raise CannotFuse("a result is an expanded tensor, which repeats elements")
    if set(outputs) & _returned_views(ir.graph):
        raise CannotFuse("a result is a view of an input, and a kernel would return a copy")
    members = [ir.prims[name] for name in prims]
    if any(prim.op is PrimOp.RECURRENT for prim in members):
        if len(ordered) > 1 or len(chosen) > 1:
            raise CannotFuse("recurrent layers need a separate kernel")
        table = AxisTable(ir.prims, (), ir.graph.sizes)
        return Region(ordered, prims, inputs, outputs, RegionKind.RECURRENT, table, (), ())
    if any(prim.op is PrimOp.LOOP for prim in members):
        return _loop_region(ir, ordered, chosen, prims, inputs, outputs)
    # An output that equals an input (a clone) has axes too.
    members_and_results = [*(name for name in results if name in inputs), *prims, *added]
    table = AxisTable(ir.prims, members_and_results, ir.graph.sizes)
    _check_distinct(members, table)
    kind = _kind(members, ir.prims, is_backward=_is_backward(ir.graph, chosen))
    if parts and kind not in (RegionKind.MAP, RegionKind.REDUCE):
        raise CannotFuse("a result is stored in several parts")
    if kind is RegionKind.ATTENTION_GRADIENT:
        return _gradient_region(ir, ordered, prims, inputs, outputs, table)
    if kind in (RegionKind.MATMUL, RegionKind.ATTENTION):
        if kind is RegionKind.MATMUL:
            _unify_products([prim for prim in members if prim.op is PrimOp.MATMUL], table)
            _check_distinct(members, table)
        return _product_region(ir, ordered, prims, inputs, outputs, kind, table)
    if kind is RegionKind.REDUCE and not parts and _is_backward(ir.graph, chosen):
        sums = column_sums(ir, members, results, inputs, table)
        if sums is not None:
            return _region_with_sums(ir, ordered, prims, inputs, outputs, table, sums)
    if _unify_reduction_axes(members, results, table):
        _check_distinct(members, table)
    reduced = _reduced_axes(members, table)
    parallel = _parallel_axes(ir, written, table, reduced, members)
    _check_reduced_values(members)
    _check_recomputation(ir, members, results, table, parallel)
    for name in results:
        axes = set(table.all_axes(name))
        if not set(parallel) <= axes and name not in repeated:
            raise CannotFuse("its results have different independent axes")
        if axes & set(reduced) and not set(reduced) <= axes:
            raise CannotFuse("a result has only part of the reduced axes")
    return Region(ordered, prims, inputs, outputs, kind, table, parallel, reduced, parts)


def _region_with_sums(
    ir: KernelIR,
    ordered: tuple[str, ...],
    prims: tuple[str, ...],
    inputs: tuple[str, ...],
    outputs: tuple[Ref, ...],
    table: AxisTable,
    sums: ColumnSums,
) -> Region:
    """The region of a kernel that walks rows and sums over all of them, too."""
    of_rows = [(ref, name) for ref in outputs if (name := ir.of(ref).name) not in sums.after]
    walked = [ir.prims[name] for name in prims if name not in sums.after]
    parallel = _parallel_axes(ir, of_rows, table, sums.columns, [])
    parallel = parallel or tuple(axis for axis in table.all_axes(ir.prims[sums.sums[0]].inputs[0]) if axis in sums.rows)
    if set(parallel) != sums.rows:
        raise CannotFuse("its results have different independent axes")
    _check_reduced_values(walked)
    return Region(ordered, prims, inputs, outputs, RegionKind.REDUCE, table, parallel, sums.columns, sums=sums.sums)


def _loop_region(
    ir: KernelIR,
    ordered: tuple[str, ...],
    chosen: set[str],
    prims: tuple[str, ...],
    inputs: tuple[str, ...],
    outputs: tuple[Ref, ...],
) -> Region:
    """The region of a loop over time steps and of the operations around it that its iterations compute."""
    from mtmc_lsp.ir.loops.fusion import fused_loop

    if chosen != set(ordered):
        raise CannotFuse("a loop over time steps recomputes no other values")
    fused_loop(ir, ordered)
    table = AxisTable(ir.prims, (), ir.graph.sizes)
    return Region(ordered, prims, inputs, outputs, RegionKind.LOOP, table, (), ())


def _unify_reduction_axes(members: list[Prim], results: list[str], table: AxisTable) -> bool:
    """Unify the axes of reductions of several tensors, and those of outputs that only read the reduced values.

    In ``y * x.norm(dim=-1, keepdim=True)`` nothing relates the columns of y to those of x. A program instance that has
    reduced its row of x can still store its row of y.

    Returns:
        Whether axes were unified.
    """
    has_tied = False
    passes = [prim for prim in members if prim.op in (PrimOp.REDUCE, PrimOp.SCAN)]
    for prim in passes[1:]:
        first, other = (reduction_axes(each, table) for each in (passes[0], prim))
        if not set(first) & set(other) and [axis.size for axis in first] == [axis.size for axis in other]:
            table.tie(first, other)
            has_tied = True
    for name in results if passes else []:
        first = reduction_axes(passes[0], table)
        reduced_input_axes = {axis for prim in passes for axis in table.all_axes(prim.inputs[0])}
        separate_axes = tuple(axis for axis in table.all_axes(name) if axis not in reduced_input_axes)
        if (
            separate_axes
            and not set(first) & set(table.all_axes(name))
            and [a.size for a in separate_axes] == [a.size for a in first]
        ):
            table.tie(first, separate_axes)
            has_tied = True
    return has_tied


def _unify_products(products: list[Prim], table: AxisTable) -> None:
    """Unify the axes of products with one left operand, such as queries, keys and values: a tile is the same part of each."""
    for other in products[1:]:
        first, roles = table.of_product(products[0]), table.of_product(other)
        for ours, theirs in ((first.batch, roles.batch), (first.m, roles.m), (first.n, roles.n), (first.k, roles.k)):
            table.align(ours, theirs)
        if table.of_product(products[0]) != table.of_product(other):
            raise CannotFuse("its products have different axes")


MAX_RECOMPUTATIONS = 4
"""A reduction may be recomputed this many times instead of being stored."""


def _check_recomputation(
    ir: KernelIR, members: list[Prim], results: list[str], table: AxisTable, parallel: tuple[Axis, ...]
) -> None:
    """Reject kernels that would reduce the same row again for each of many output elements."""
    for prim in members:
        if prim.op is not PrimOp.REDUCE or any(
            set(reduction_axes(prim, table)) & set(table.all_axes(n)) for n in results
        ):
            continue
        repeated = set(parallel) - set(table.all_axes(prim.inputs[0]))
        if product([axis.size for axis in repeated]).value(ir.graph.sizes) > MAX_RECOMPUTATIONS:
            raise CannotFuse("a reduction would be recomputed for each element of a result")


def _check_distinct(members: list[Prim], table: AxisTable) -> None:
    """Reject tensors that use one axis for two of their dimensions, such as ``x + x.t()``.

    They need two sets of axes. Inputs are checked too: otherwise the mean over the rows of a square matrix, combined with the
    columns of another tensor, would become the mean of its diagonal.
    """
    for name in dict.fromkeys(each for prim in members for each in (*prim.inputs, prim.name)):
        axes = table.all_axes(name)
        if len(axes) > 1 and len(set(axes)) != len(axes):
            raise CannotFuse("a tensor is combined with itself along another axis")


def _check_convex(ir: KernelIR, members: set[str], chosen: set[str]) -> None:
    """Reject sets that are not convex: a path that leaves the region and returns would need two launches.

    Recomputed nodes do not start such a path, because other readers take the value from another kernel.
    """
    leaving: set[str] = set()
    outside: set[str] = set()
    graph = ir.graph
    node_positions = [graph.positions[name] for name in chosen if name in graph.positions]
    # Nodes on a path out of the region and back run between its first and its last node.
    for node in graph.nodes[min(node_positions, default=0) : max(node_positions, default=-1) + 1]:
        sources = {ref.name for ref in node.inputs()}
        if node.name in chosen:
            if sources & outside:
                raise CannotFuse("a node outside it reads one of its values and feeds another of its nodes")
            if node.name in members or sources & leaving:
                leaving.add(node.name)
        elif sources & (leaving | outside):
            outside.add(node.name)


def _is_backward(graph: Graph, chosen: set[str]) -> bool:
    """Whether nodes are of a backward pass, in the graph of both passes or in that of the backward pass alone."""
    return chosen <= graph.backward_nodes or any(item.kind is InputKind.TANGENT for item in graph.inputs)


def _kind(members: list[Prim], prims: Mapping[str, Prim], *, is_backward: bool) -> RegionKind:
    ops = [prim.op for prim in members]
    if attention_form(members) is not None:
        return RegionKind.ATTENTION
    if is_backward and ops.count(PrimOp.MATMUL) > 1 and gradient_form(members) is not None:
        return RegionKind.ATTENTION_GRADIENT
    products = [prim for prim in members if prim.op is PrimOp.MATMUL]
    if len(products) > 1 and not are_siblings(prims, products):
        raise CannotFuse("two matrix products")
    if PrimOp.MATMUL in ops:
        if {PrimOp.REDUCE, PrimOp.SCAN, PrimOp.UNROLLED_REDUCE} & set(ops):
            raise CannotFuse("a reduction and a matrix product")
        return RegionKind.MATMUL
    if PrimOp.SCAN in ops:
        if PrimOp.REDUCE in ops:
            raise CannotFuse("a reduction and a scan")
        if ops.count(PrimOp.SCAN) > 1:
            raise CannotFuse("two scans")
        _check_scan_reads(members)
        return RegionKind.SCAN
    return RegionKind.REDUCE if PrimOp.REDUCE in ops else RegionKind.MAP


def _check_scan_reads(members: list[Prim]) -> None:
    """Reject indexed reads of a scan's result: only the current block of columns is available."""
    scanned: set[str] = set()
    for prim in members:
        if prim.op is PrimOp.SCAN or scanned & set(prim.inputs):
            scanned.add(prim.name)
        is_indexed = prim.op in (PrimOp.SLICE, PrimOp.FLIP, PrimOp.CAT, PrimOp.PAD, PrimOp.GATHER, PrimOp.WINDOW)
        if is_indexed and scanned & set(prim.inputs):
            raise CannotFuse("a scan's result is read at a different index")


def _check_reduced_values(members: list[Prim]) -> None:
    """Reject concatenation, padding or gathering of a reduced value along a reduced dimension."""
    shapes = {prim.name: prim.shape for prim in members}
    reduced: set[str] = set()
    for prim in members:
        if prim.op in (PrimOp.CAT, PrimOp.PAD, PrimOp.GATHER, PrimOp.WINDOW):
            sources = prim.inputs if prim.op is PrimOp.CAT else prim.inputs[:1]
            for name in reduced & set(sources):
                if any(size == ONE != result_size for size, result_size in zip(shapes[name], prim.shape, strict=False)):
                    raise CannotFuse("a reduction's result is concatenated, padded or gathered")
        if prim.op is PrimOp.REDUCE or reduced & set(prim.inputs):
            reduced.add(prim.name)


def reduction_axes(prim: Prim, table: AxisTable) -> tuple[Axis, ...]:
    """The axes that a reduction or scan runs over, outermost first."""
    dims = prim.attrs["dims"] if prim.op is PrimOp.REDUCE else (prim.attrs["dim"],)
    assert isinstance(dims, tuple)
    return tuple(axis for dim in dims for axis in table.axes(prim.inputs[0], dim))


def _reduced_axes(members: list[Prim], table: AxisTable) -> tuple[Axis, ...]:
    reduced: tuple[Axis, ...] | None = None
    for prim in members:
        if prim.op in (PrimOp.REDUCE, PrimOp.SCAN):
            axes = reduction_axes(prim, table)
            if reduced is not None and set(axes) != set(reduced):
                raise CannotFuse("two reductions over different axes")
            reduced = axes if reduced is None else reduced
    return reduced or ()


def _parallel_axes(
    ir: KernelIR,
    written: list[tuple[Ref, str]],
    table: AxisTable,
    reduced: tuple[Axis, ...],
    members: list[Prim],
) -> tuple[Axis, ...]:
    """The independent axes, ordered so that the last one is contiguous in memory."""
    order: list[tuple[int, Axis]] = []
    known: set[Axis] = set()
    sizes = ir.graph.sizes
    for ref, name in written:
        for dim, stride in enumerate(ir.graph.type_of(ref).stride):
            for position, axis in enumerate(reversed(table.axes(name, dim))):
                if axis not in known and axis not in reduced:
                    known.add(axis)
                    # By the dimension's memory stride, then by the axis's position inside the dimension.
                    order.append((stride.value(sizes) * 1024 + position, axis))
    for prim in members:
        if prim.op in (PrimOp.REDUCE, PrimOp.SCAN):
            for axis in table.all_axes(prim.inputs[0]):
                if axis not in known and axis not in reduced:
                    raise CannotFuse("a reduction has axes that its result lacks")
    return tuple(axis for _, axis in sorted(order, key=lambda item: -item[0]))


def _product_region(
    ir: KernelIR,
    nodes: tuple[str, ...],
    prims: tuple[str, ...],
    inputs: tuple[str, ...],
    outputs: tuple[Ref, ...],
    kind: RegionKind,
    table: AxisTable,
) -> Region:
    """The region of a kernel with matrix products; its outputs must have exactly the products' axes."""
    # In attention, the second of the two products gives the result.
    products = [name for name in prims if ir.prims[name].op is PrimOp.MATMUL]
    matmul = ir.prims[products[-1]]
    halves = _column_halves(ir, prims, products, table) if kind is RegionKind.MATMUL else None
    parallel = table.all_axes(matmul.name)
    if halves is not None:
        parallel = (*(axis for axis in parallel if axis != halves.whole), *halves.axes)
    form = attention_form([ir.prims[name] for name in prims]) if kind is RegionKind.ATTENTION else None
    for ref in outputs:
        name = ir.of(ref).name
        if form is not None and form.is_statistic(ir.prims, name):
            continue
        if set(table.all_axes(name)) != set(parallel):
            raise CannotFuse("a result does not have the product's axes")
    dependents, cropped = {matmul.name} if kind is RegionKind.ATTENTION else set(products), set[str]()
    for name in prims:
        prim = ir.prims[name]
        if dependents & set(prim.inputs):
            dependents.add(name)
            is_half = prim.op is PrimOp.SLICE and halves is not None
            if prim.op not in AFTER_A_PRODUCT and not is_half:
                raise CannotFuse("an operation after the product is not elementwise")
            if prim.op is PrimOp.RESHAPE and cropped & set(prim.inputs):
                raise CannotFuse("a reshape of a cropped product")
            if prim.op is PrimOp.CROP or cropped & set(prim.inputs):
                cropped.add(name)
    dims = ProductDims.of(matmul)
    if dims.kernel_positions and not all(is_in_memory(ir.prims, name, inputs) for name in matmul.inputs):
        raise CannotFuse("the input of the windows would be recomputed at each kernel position")
    if kind is RegionKind.ATTENTION and (
        reason := why_not_attention([ir.prims[name] for name in prims], table, ir.graph)
    ):
        raise CannotFuse(reason)
    summed = table.of_product(matmul).k
    return Region(nodes, prims, inputs, outputs, kind, table, parallel, summed, halves=halves)


def _gradient_region(
    ir: KernelIR,
    nodes: tuple[str, ...],
    prims: tuple[str, ...],
    inputs: tuple[str, ...],
    outputs: tuple[Ref, ...],
    table: AxisTable,
) -> Region:
    """The region of a kernel that computes gradients of an attention: products whose layout alone may change behind them."""
    members = {name: ir.prims[name] for name in prims}
    form = gradient_form(list(members.values()))
    assert form is not None
    join_tiles(list(members.values()), table)
    if reason := why_no_gradients(form, table, ir.graph):
        raise CannotFuse(reason)
    for prim in (*form.inner, *form.results):
        for name in prim.inputs:
            is_tile = prim in form.results and form.is_tile(members, name)
            if not is_tile and not is_in_memory(ir.prims, name, inputs):
                raise CannotFuse("an operand of the gradients of an attention would be computed for each tile")
    for ref in outputs:
        name = ir.of(ref).name
        while ir.prims[name].op in BIJECTIVE_VIEWS:
            name = ir.prims[name].inputs[0]
        if ir.prims[name] not in form.results:
            raise CannotFuse("a value for each pair of a query and a key is in memory")
    first = table.of_product(form.results[0])
    parallel = table.all_axes(form.results[0].name)
    return Region(nodes, prims, inputs, outputs, RegionKind.ATTENTION_GRADIENT, table, parallel, first.k)


AFTER_A_PRODUCT = (PrimOp.POINTWISE, PrimOp.RESHAPE, PrimOp.PERMUTE, PrimOp.EXPAND, PrimOp.CROP)
"""Operations that a product's kernel applies to its results."""


def _column_halves(ir: KernelIR, prims: tuple[str, ...], products: list[str], table: AxisTable) -> ColumnHalves | None:
    """The halves of a 16-bit product's columns, if all its readers read them; None for other products.

    ``gate, up = (x @ w).chunk(2, -1)`` reads them. Both slices have the same axes afterwards.
    """
    product = ir.prims[products[0]]
    whole = table.of_product(product).n
    if len(products) > 1 or len(whole) != 1 or not are_siblings(ir.prims, [product]):
        return None
    length = whole[0].size.divide_exactly(Size.of(2))
    undivided, slices = {product.name}, list[Prim]()
    for prim in (ir.prims[name] for name in prims):
        if not undivided & set(prim.inputs):
            continue
        last = len(prim.shape) - 1
        is_slice = prim.op is PrimOp.SLICE and prim.attrs["dim"] == last and prim.attrs["step"] == 1
        if is_slice and prim.shape[-1] == length and prim.attrs["start"] in (Size.of(0), length):
            slices.append(prim)
        elif prim.op in (PrimOp.POINTWISE, PrimOp.RESHAPE):
            undivided.add(prim.name)
        else:
            return None
    if length is None or len({str(prim.attrs["start"]) for prim in slices}) != 2:
        return None
    first, *others = (table.axes(prim.name, len(prim.shape) - 1) for prim in slices)
    for other in others:
        table.align(first, other)
    return ColumnHalves(whole[0], table.axes(slices[0].name, len(slices[0].shape) - 1), length)
