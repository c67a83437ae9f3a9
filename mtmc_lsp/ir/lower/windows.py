"""Windows that slide over a tensor, and the arguments of the operations that have them."""

from __future__ import annotations

from mtmc_lsp.core.sizes import Size
from mtmc_lsp.ir.lower import Call
from mtmc_lsp.ir.primitives import Builder, PrimOp


def per_dim(c: Call, position: int, name: str, default: int, dims: int) -> tuple[int, ...]:
    """An argument with one number per spatial dimension; a single number (or an empty list's default) is for all."""
    value = c.raw(position, name)
    items = value if isinstance(value, tuple) else (() if value is None else (value,))
    numbers = [item.constant if isinstance(item, Size) and item.is_constant else item for item in items]
    if not all(isinstance(item, int) for item in numbers):
        raise c.fail(f"{name} is not a number")
    whole = [int(str(item)) for item in numbers] or [default]
    return tuple(whole * dims if len(whole) == 1 else whole)


def constant_sizes(c: Call, sizes: tuple[Size, ...], what: str) -> tuple[int, ...]:
    """Sizes that a kernel must know.

    Raises:
        CannotLower: one is symbolic.
    """
    if not all(size.is_constant for size in sizes):
        raise c.fail(f"a symbolic {what}")
    return tuple(size.constant for size in sizes)


def padded(b: Builder, x: str, dims: dict[int, tuple[int, Size]], value: float) -> str:
    """``x`` with ``value`` around it: for each dimension how much comes before it and how long it is then."""
    shape, before = list(b.shape(x)), [0] * len(b.shape(x))
    for dim, (amount, size) in dims.items():
        shape[dim], before[dim] = size, amount
    if tuple(shape) == b.shape(x) and not any(before):
        return x
    return b.add(PrimOp.PAD, (x,), shape, b.dtype(x), before=tuple(before), value=value)


def windowed(b: Builder, x: str, dim: int, places: Size, kernel_size: int, step: int, dilation: int) -> str:
    """``x`` with windows of ``kernel_size`` elements along ``dim``; the places in a window are a new last dimension."""
    shape = list(b.shape(x))
    shape[dim] = places
    if kernel_size == 1:
        return b.reshape(b.slice(x, dim, 0, places, step), [*shape, 1])
    return b.add(PrimOp.WINDOW, (x,), [*shape, kernel_size], b.dtype(x), dim=dim, step=step, dilation=dilation)


def sliding(
    b: Builder,
    x: str,
    places: tuple[Size, ...],
    kernel_sizes: tuple[int, ...],
    *,
    steps: tuple[int, ...],
    dilations: tuple[int, ...],
    before: tuple[int, ...],
    outside: float,
) -> str:
    """Windows along the last dimensions of ``x``, padded as far as they reach; their places are new last dimensions."""
    first = len(b.shape(x)) - len(kernel_sizes)
    reach = {}
    for i, (count, kernel_size, step, dilation, amount) in enumerate(
        zip(places, kernel_sizes, steps, dilations, before, strict=True), start=first
    ):
        end = (count - 1) * step + (kernel_size - 1) * dilation + 1
        # Padding behind counts only where a window reaches it; what no window reaches stays unread.
        inner = b.shape(x)[i] + amount
        beyond = end.is_constant and inner.is_constant and end.constant <= inner.constant
        reach[i] = (amount, inner if beyond else end)
    x = padded(b, x, reach, outside)
    for i, (count, kernel_size, step, dilation) in enumerate(
        zip(places, kernel_sizes, steps, dilations, strict=True), start=first
    ):
        x = windowed(b, x, i, count, kernel_size, step, dilation)
    return x
