"""Folds: few elements taken one after another, as those of a pooling window, wherever the result is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mtmc_lsp.codegen.kernel.index import Index, Variable
from mtmc_lsp.codegen.kernel.persistence import parted
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
"""For each fold: what changes nothing, and the statement that takes one more element in."""
UNROLLED = 27
"""Elements up to which the loop is unrolled, so that their loads overlap."""


def folded(tile: TileBase, prim: Prim, at: tuple[Index, ...]) -> Code:
    """The value of a fold at an index: a loop over its elements, which keeps one running value per place.

    Raises:
        CannotCode: it folds by a function that has no such loop.
    """
    if prim.fn not in STEPS:
        raise CannotCode(f"a fold by {prim.fn}")
    dims = prim.attrs["dims"]
    assert isinstance(dims, tuple)
    shape = tile.ir.prims[prim.inputs[0]].shape
    names = tile.parameters.names
    kernel_position, total = names.unique("kernel_position"), names.unique(f"window_{prim.fn}")
    places = _places(kernel_position, [shape[dim] for dim in dims], tile)
    rest = iter(at)
    inner = tuple(Index.of(places[dims.index(i)]) if i in dims else next(rest) for i in range(len(shape)))
    expressions = tile.tile
    emit, cache, declared = expressions.emit, dict(expressions.cache), set(expressions.declared)
    written: list[tuple[str, bool]] = []
    expressions.emit = lambda text, cols: written.append((text, cols))
    value = expressions.cast(expressions.value(prim.inputs[0], inner), prim.dtype)
    # What was set inside the loop is not known after it.
    expressions.emit, expressions.cache = emit, cache
    neutral, step = STEPS[prim.fn]
    before, inside = parted([text for text, _ in written], {kernel_position})
    varying = dict(written)
    for line in before:
        emit(line, varying[line])
    expressions.declared = declared | {line.split(" = ")[0] for line in before}
    kind = TRITON_DTYPES[compute_dtype(prim.dtype)]
    emit(f"{total} = tl.full({tile.shape_text(value)}, {neutral}, {kind})", value.cols)
    count = product([shape[dim] for dim in dims])
    unrolled = count.is_constant and count.constant <= UNROLLED
    emit(
        f"for {kernel_position} in {'tl.static_range' if unrolled else 'range'}({tile.parameters.size(count).text}):",
        value.cols,
    )
    for line in [*inside, step.format(total=total, value=value.text)]:
        emit("\n".join(f"    {part}" for part in line.split("\n")), value.cols)
    return Code(total, compute_dtype(prim.dtype), value.rows, value.cols)


def _places(kernel_position: str, sizes: list[Size], tile: TileBase) -> list[Variable]:
    """One index per folded dimension, taken out of the loop's variable."""
    found: list[Variable] = []
    below = ONE
    for number, size in reversed(list(enumerate(sizes))):
        text = kernel_position if below == ONE else f"({kernel_position} // {tile.parameters.divisor(below)})"
        if number and size != ONE:
            text = f"({text} % {tile.parameters.divisor(size)})"
        found.append(Variable(-1, size, text if size != ONE else "0"))
        below = below * size
    return list(reversed(found))
