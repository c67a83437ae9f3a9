"""Folds: reductions over a few elements, such as a pooling window, evaluated in a loop wherever the result is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mtmc_lsp.codegen.kernel.index import Index, Variable
from mtmc_lsp.codegen.kernel.persistence import hoist_invariants
from mtmc_lsp.codegen.kernel.snippets import TRITON_DTYPES, Code
from mtmc_lsp.core.dtypes import compute_dtype
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.sizes import Size, product
from mtmc_lsp.ir.primitives import ONE, Prim

if TYPE_CHECKING:
    from mtmc_lsp.codegen.tile.tile import TileBase

STEPS = {
    "sum": ("0.0", "{total} += {value}"),
    "prod": ("1.0", "{total} *= {value}"),
    "max": ('-float("inf")', "{total} = tl.maximum({total}, {value}, propagate_nan=tl.PropagateNan.ALL)"),
    "min": ('float("inf")', "{total} = tl.minimum({total}, {value}, propagate_nan=tl.PropagateNan.ALL)"),
}
"""For each fold function: its neutral element, and the statement that adds one element."""
UNROLLED = 27
"""Maximum number of elements for which the loop is unrolled, so that their loads overlap."""


def folded(tile: TileBase, prim: Prim, at: tuple[Index, ...]) -> Code:
    """The value of a fold at an index: emits a loop over its elements with one accumulator per tile element.

    Raises:
        CannotCode: the fold function is not supported.
    """
    if prim.fn not in STEPS:
        raise CannotCode(
            f"{prim.origin}: a window reduction with {prim.fn} is not supported in a kernel; leave it to PyTorch"
        )
    dims = prim.attrs["dims"]
    assert isinstance(dims, tuple)
    shape = tile.ir.prims[prim.inputs[0]].shape
    names = tile.parameters.names
    kernel_position, total = names.unique("kernel_position"), names.unique(f"window_{prim.fn}")
    window_indices = _window_indices(kernel_position, [shape[dim] for dim in dims], tile)
    outer_indices = iter(at)
    inner = tuple(
        Index.of(window_indices[dims.index(i)]) if i in dims else next(outer_indices) for i in range(len(shape))
    )
    expressions = tile.tile
    emit, cache, declared = expressions.emit, dict(expressions.cache), set(expressions.declared)
    body: list[tuple[str, bool]] = []
    expressions.emit = lambda text, cols: body.append((text, cols))
    value = expressions.cast(expressions.value(prim.inputs[0], inner), prim.dtype)
    # Variables assigned inside the loop are not reused after it.
    expressions.emit, expressions.cache = emit, cache
    neutral, step = STEPS[prim.fn]
    before, inside = hoist_invariants([text for text, _ in body], {kernel_position})
    varying = dict(body)
    for line in before:
        emit(line, varying[line])
    expressions.declared = declared | {line.split(" = ")[0] for line in before}
    dtype = TRITON_DTYPES[compute_dtype(prim.dtype)]
    emit(f"{total} = tl.full({tile.shape_text(value)}, {neutral}, {dtype})", value.cols)
    count = product([shape[dim] for dim in dims])
    is_unrolled = count.is_constant and count.constant <= UNROLLED
    emit(
        f"for {kernel_position} in {'tl.static_range' if is_unrolled else 'range'}({tile.parameters.size(count).text}):",
        value.cols,
    )
    for line in [*inside, step.format(total=total, value=value.text)]:
        emit("\n".join(f"    {part}" for part in line.split("\n")), value.cols)
    return Code(total, compute_dtype(prim.dtype), value.rows, value.cols)


def _window_indices(kernel_position: str, sizes: list[Size], tile: TileBase) -> list[Variable]:
    """One index per folded dimension, computed from the loop variable."""
    indices: list[Variable] = []
    inner_size = ONE
    for number, size in reversed(list(enumerate(sizes))):
        text = kernel_position if inner_size == ONE else f"({kernel_position} // {tile.parameters.divisor(inner_size)})"
        if number and size != ONE:
            text = f"({text} % {tile.parameters.divisor(size)})"
        indices.append(Variable(-1, size, text if size != ONE else "0"))
        inner_size = inner_size * size
    return list(reversed(indices))
