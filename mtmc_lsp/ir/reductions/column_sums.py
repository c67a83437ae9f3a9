"""Column sums: sums over all rows, in the kernel that walks these rows.

In the backward pass of a norm, the gradient of the input is computed row by row, and the gradients of weight and bias are sums
over all rows of values that the same kernel has in registers. Such a kernel reads the rows once. Each of its programs adds the
rows that it walks, and a second launch adds the sums of all programs and applies the operations after them.

This is legal because nothing in a row depends on a sum over the rows, and what depends on one has no rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mtmc_lsp.core.dtypes import is_float
from mtmc_lsp.core.sizes import product
from mtmc_lsp.ir.axes import Axis, AxisTable
from mtmc_lsp.ir.primitives import KernelIR, Prim, PrimOp

if TYPE_CHECKING:
    from mtmc_lsp.core.graph import Ref
    from mtmc_lsp.ir.regions import Region

MOST_ACCUMULATORS = 16384
"""Most accumulators of a program, one for each column and sum. With 16384, kernels of norms for sm_90 spill at most 96 bytes of
each thread; with 32768, that of a layer norm spilled 152 bytes in 32 warps, and 720 in 16."""
AFTER = frozenset(
    {PrimOp.POINTWISE, PrimOp.RESHAPE, PrimOp.PERMUTE, PrimOp.EXPAND, PrimOp.CONSTANT, PrimOp.IOTA, PrimOp.ALIAS}
)
"""Operations that may follow a sum over the rows."""


@dataclass(frozen=True)
class ColumnSums:
    """The sums over all rows of a region, and the axes of its rows and columns."""

    sums: tuple[str, ...]
    """Reductions over the rows, in execution order."""
    after: frozenset[str]
    """These reductions and what depends on them."""
    rows: frozenset[Axis]
    columns: tuple[Axis, ...]
    """Outermost first."""


def column_sums(
    ir: KernelIR, members: Collection[Prim], results: Collection[str], inputs: Collection[str], table: AxisTable
) -> ColumnSums | None:
    """The column sums of a set of primitives; None if it has none, or something in a row depends on one."""
    reductions = [prim for prim in members if prim.op is PrimOp.REDUCE]
    by_axes: dict[frozenset[Axis], list[Prim]] = {}
    for prim in reductions:
        by_axes.setdefault(frozenset(_reduced(prim, table)), []).append(prim)
    for rows, sums in by_axes.items():
        found = _sums_over(ir, members, results, inputs, table, rows, sums)
        if found is not None:
            return found
    return None


def _reduced(prim: Prim, table: AxisTable) -> tuple[Axis, ...]:
    dims = prim.attrs["dims"]
    assert isinstance(dims, tuple)
    return tuple(axis for dim in dims for axis in table.axes(prim.inputs[0], dim))


def _sums_over(
    ir: KernelIR,
    members: Collection[Prim],
    results: Collection[str],
    inputs: Collection[str],
    table: AxisTable,
    rows: frozenset[Axis],
    sums: Collection[Prim],
) -> ColumnSums | None:
    """The sums over ``rows``, if these are the rows of a kernel."""
    operands = [table.all_axes(prim.inputs[0]) for prim in sums]
    columns = tuple(axis for axis in operands[0] if axis not in rows)
    if not rows or not columns or any(prim.fn != "sum" or not is_float(prim.dtype) for prim in sums):
        return None
    if any(set(axes) != {*rows, *columns} or len(set(axes)) != len(axes) for axes in operands):
        return None
    after = {prim.name for prim in sums}
    for prim in members:
        if prim.op is PrimOp.REDUCE and prim.name not in after and set(_reduced(prim, table)) != set(columns):
            return None
        if after & set(prim.inputs):
            if prim.op not in AFTER:
                return None
            after.add(prim.name)
    if any(rows & set(table.all_axes(name)) for name in after):
        return None
    of_rows = [name for name in results if name not in after]
    of_sums = [name for name in results if name in after]
    if not of_sums or any(set(table.all_axes(name)) != set(columns) for name in of_sums):
        return None
    walks_rows = len(sums) < sum(prim.op is PrimOp.REDUCE for prim in members)
    walks_rows = walks_rows or any({*rows, *columns} <= set(table.all_axes(name)) for name in of_rows)
    if not walks_rows or any(not rows <= set(table.all_axes(name)) for name in of_rows):
        return None
    sizes = ir.graph.sizes
    padded = 1 << (product([axis.size for axis in columns]).value(sizes) - 1).bit_length()
    if padded * len(sums) > MOST_ACCUMULATORS or not _are_dense(ir, inputs, table, columns):
        return None
    names = tuple(prim.name for prim in sums)
    needed = _needed(ir, of_sums, names, inputs)
    if any(ir.prims[name].op not in AFTER or rows & set(table.all_axes(name)) for name in needed - set(names)):
        return None
    return ColumnSums(names, frozenset(after), rows, columns)


def _are_dense(ir: KernelIR, inputs: Collection[str], table: AxisTable, columns: tuple[Axis, ...]) -> bool:
    """Whether the largest tensors that are read are contiguous along the columns."""
    sizes = ir.graph.sizes
    read = [(name, ir.graph.type_of(ref)) for name in inputs for ref in ir.values_of.get(name, ())]
    largest = max((kind.numel.value(sizes) for _, kind in read), default=0)
    dense = {
        axes[-1]
        for name, kind in read
        if kind.numel.value(sizes) == largest
        for dim in kind.dense_dims
        if (axes := table.axes(name, dim))
    }
    return bool(dense) and dense <= set(columns)


def _needed(ir: KernelIR, roots: Iterable[str], ends: Collection[str], inputs: Collection[str]) -> set[str]:
    """Primitives that ``roots`` are computed from, without inputs and what ``ends`` are computed from."""
    needed, pending = set[str](), list(roots)
    while pending:
        name = pending.pop()
        if name not in needed and name not in inputs:
            needed.add(name)
            pending += () if name in ends else ir.prims[name].inputs
    return needed


def part_for_rows(ir: KernelIR, region: Region) -> Region:
    """What the first launch computes: the results with rows, and the operands of the sums."""
    outputs = _outputs(ir, region, with_rows=True)
    roots = [*(ir.of(ref).name for ref in outputs), *(ir.prims[name].inputs[0] for name in region.sums)]
    needed = _needed(ir, roots, (), region.inputs)
    return _part(ir, region, needed, roots, outputs)


def part_after_sums(ir: KernelIR, region: Region) -> Region:
    """What the second launch computes from the sums of all programs; its independent axes are the columns."""
    from mtmc_lsp.ir.regions import RegionKind

    outputs = _outputs(ir, region, with_rows=False)
    roots = [ir.of(ref).name for ref in outputs]
    needed = _needed(ir, roots, region.sums, region.inputs)
    part = _part(ir, region, needed, (), outputs)
    return replace(part, kind=RegionKind.MAP, parallel_axes=region.reduced_axes, reduced_axes=())


def results_of_sums(ir: KernelIR, region: Region) -> dict[str, Ref]:
    """For each sum, the first result that is computed from it."""
    results: dict[str, Ref] = {}
    for ref in _outputs(ir, region, with_rows=False):
        for name in _needed(ir, [ir.of(ref).name], region.sums, region.inputs) & set(region.sums):
            results.setdefault(name, ref)
    return results


def _outputs(ir: KernelIR, region: Region, *, with_rows: bool) -> tuple[Ref, ...]:
    rows = set(region.parallel_axes)
    return tuple(ref for ref in region.outputs if bool(rows & set(region.table.all_axes(ir.of(ref).name))) is with_rows)


def _part(
    ir: KernelIR, region: Region, needed: Collection[str], roots: Iterable[str], outputs: tuple[Ref, ...]
) -> Region:
    read = {source for name in needed if name not in region.sums for source in ir.prims[name].inputs} | set(roots)
    prims = tuple(name for name in region.prims if name in needed)
    inputs = tuple(name for name in region.inputs if name in read)
    return replace(region, prims=prims, inputs=inputs, outputs=outputs, sums=())
