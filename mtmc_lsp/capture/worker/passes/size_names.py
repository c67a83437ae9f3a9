"""The names of sizes that an export leaves free, from the shapes in the workload. Runs in workers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mtmc_lsp.core.sizes import Size


def widths_of(shapes: Iterable[Sequence[Size]]) -> frozenset[str]:
    """The named sizes in innermost dimensions of the tensors that have several dimensions."""
    return frozenset(name for shape in shapes if len(shape) > 1 for name in shape[-1].symbols())


def size_names(shape: Sequence[Size], widths: frozenset[str]) -> tuple[str, ...]:
    """For each dimension the name of its size, or an expression such as ``B*S``; empty for a size that stays constant.

    Kernels are written for constant widths where the code divides them. So ``4*H`` stays constant if ``H`` is a width, and so
    does an expression in the innermost dimension. Products of batch and length, and multiples of the batch, are free.
    """
    return tuple(_name(size, widths, is_innermost=d == len(shape) - 1 and d > 0) for d, size in enumerate(shape))


def _name(size: Size, widths: frozenset[str], *, is_innermost: bool) -> str:
    if size.is_symbol:
        return str(size)
    symbols = set(size.symbols())
    is_multiple_of_width = len(symbols) == 1 and not symbols.isdisjoint(widths)
    return "" if not symbols or is_innermost or is_multiple_of_width else str(size)
