"""Sliding windows over a tensor, and the arguments of operations that use them."""

from __future__ import annotations

from mtmc_lsp.core.sizes import Size
from mtmc_lsp.ir.lower import Call
from mtmc_lsp.ir.primitives import Builder, PrimOp


def per_dim(c: Call, position: int, name: str, default: int, dims: int) -> tuple[int, ...]:
    """An argument with one number per spatial dimension; a single number, or the default, applies to all dimensions."""
    value = c.raw(position, name)
    items = value if isinstance(value, tuple) else (() if value is None else (value,))
    numbers = [item.constant if isinstance(item, Size) and item.is_constant else item for item in items]
    if not all(isinstance(item, int) for item in numbers):
        raise c.fail(f"{name} is not a number")
    integers = [int(str(item)) for item in numbers] or [default]
    return tuple(integers * dims if len(integers) == 1 else integers)


def constant_sizes(c: Call, sizes: tuple[Size, ...], what: str) -> tuple[int, ...]:
    """Sizes that must be compile-time constants.

    Raises:
        CannotLower: one is symbolic.
    """
    if not all(size.is_constant for size in sizes):
        raise c.fail(f"a symbolic {what}")
    return tuple(size.constant for size in sizes)


def padded(b: Builder, x: str, dims: dict[int, tuple[int, Size]], value: float) -> str:
    """``x`` padded with ``value``; ``dims`` maps a dimension to the padding in front and the padded size."""
    shape, before = list(b.shape(x)), [0] * len(b.shape(x))
    for dim, (amount, size) in dims.items():
        shape[dim], before[dim] = size, amount
    if tuple(shape) == b.shape(x) and not any(before):
        return x
    return b.add(PrimOp.PAD, (x,), shape, b.dtype(x), before=tuple(before), value=value)


def windowed(b: Builder, x: str, dim: int, outputs: Size, kernel_size: int, step: int, dilation: int) -> str:
    """``x`` with windows of ``kernel_size`` elements along ``dim``; the window elements are a new last dimension."""
    shape = list(b.shape(x))
    shape[dim] = outputs
    if kernel_size == 1:
        return b.reshape(b.slice(x, dim, 0, outputs, step), [*shape, 1])
    return b.add(PrimOp.WINDOW, (x,), [*shape, kernel_size], b.dtype(x), dim=dim, step=step, dilation=dilation)


def sliding_windows(
    b: Builder,
    x: str,
    outputs: tuple[Size, ...],
    kernel_sizes: tuple[int, ...],
    *,
    steps: tuple[int, ...],
    dilations: tuple[int, ...],
    before: tuple[int, ...],
    outside: float,
) -> str:
    """Windows along the last dimensions of ``x``, padded as far as needed; the window elements are new last dimensions."""
    first = len(b.shape(x)) - len(kernel_sizes)
    padding = {}
    for i, (count, kernel_size, step, dilation, amount) in enumerate(
        zip(outputs, kernel_sizes, steps, dilations, before, strict=True), start=first
    ):
        end = (count - 1) * step + (kernel_size - 1) * dilation + 1
        # Padding behind is needed only if a window reaches it; elements that no window reaches are not read.
        padded_front = b.shape(x)[i] + amount
        ends_inside = end.is_constant and padded_front.is_constant and end.constant <= padded_front.constant
        padding[i] = (amount, padded_front if ends_inside else end)
    x = padded(b, x, padding, outside)
    for i, (count, kernel_size, step, dilation) in enumerate(
        zip(outputs, kernel_sizes, steps, dilations, strict=True), start=first
    ):
        x = windowed(b, x, i, count, kernel_size, step, dilation)
    return x
