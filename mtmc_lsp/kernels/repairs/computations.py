"""Repairs of computations: axes of reductions, divisors, exponentials without their maximum, offsets by one."""

from __future__ import annotations

from collections.abc import Iterator

from tree_sitter import Node

from mtmc_lsp.kernels.messages import FaultKind
from mtmc_lsp.kernels.repairs.site import MEMORY, Repair, Site, repair, replaced
from mtmc_lsp.kernels.repairs.values import NEUTRAL
from mtmc_lsp.source.lint.kernel import argument, names_in
from mtmc_lsp.source.syntax import field, text_of, walk

VALUES = (FaultKind.WRONG_VALUES,)
AXES = (*VALUES, FaultKind.RAISES)
OFFSETS = (*VALUES, FaultKind.READ_OUTSIDE, FaultKind.WRITE_OUTSIDE, FaultKind.NOT_WRITTEN)


def axis_repairs(site: Site) -> Iterator[Repair]:
    """The other axes of a reduction: 0, 1 and, of blocks with three axes, 2."""
    has_three = any(text_of(node).count("None") == 2 for node in walk(site.kernel.body) if node.type == "subscript")
    for name, call in site.kernel.calls:
        axis = argument(call, 1, "axis") if name in NEUTRAL else None
        if axis is None or axis.type != "integer":
            continue
        for other in ("0", "1", "2")[: 2 + has_three]:
            if other != text_of(axis):
                title = f"Reduce along axis {other} instead of {text_of(axis)}"
                yield repair(title, call, AXES, replaced(axis, other), rank=3)


def divisor_repairs(site: Site) -> Iterator[Repair]:
    """Sizes instead of blocks as the divisor of a mean: ``tl.sum(x) / N`` for ``tl.sum(x) / BLOCK``."""
    kernel = site.kernel
    blocks = {
        name
        for called, call in kernel.calls
        if called in ("arange", "zeros", "full")
        for name in names_in(call)
        if name in kernel.parameters
    }
    sizes = [name for name in site.numbers if "stride" not in name.lower()]
    for node in walk(kernel.body):
        divisor = field(node, "right") if node.type == "binary_operator" else None
        if divisor is None or text_of(field(node, "operator")) != "/" or text_of(divisor) not in blocks:
            continue
        for rank, size in enumerate(sizes):
            title = f"Divide by {size} instead of {text_of(divisor)}"
            yield repair(title, node, VALUES, replaced(divisor, size), rank=rank)


def exponential_repairs(site: Site) -> Iterator[Repair]:
    """The maximum that an exponential subtracts: a named one before it, else the one of its operand."""
    kernel = site.kernel
    maxima = [
        (name, values[-1].end_byte)
        for name, values in kernel.values.items()
        if any(v.type == "call" and kernel.triton_name(field(v, "function")) == "max" for v in values)
    ]
    for called, call in kernel.calls:
        operand = argument(call, 0, "x") if called in ("exp", "exp2") else None
        if operand is None or operand.type not in ("identifier", "call"):
            continue
        named = [name for name, end in maxima if end < call.start_byte]
        shifts = [*named[::-1], *([f"tl.max({text_of(operand)}, axis=0)"] if not named else [])]
        for rank, shift in enumerate(shifts):
            title = f"Subtract {shift} before tl.{called}"
            yield repair(title, call, VALUES, replaced(operand, f"{text_of(operand)} - {shift}"), rank=3 + rank)


def magnitude_repairs(site: Site) -> Iterator[Repair]:
    """Maxima of absolute values, as scales of quantised numbers need them."""
    kernel = site.kernel
    for called, call in kernel.calls:
        position, keyword = (0, "input") if called == "max" else (1, "y")
        operand = argument(call, position, keyword) if called in ("max", "maximum") else None
        if operand is None or operand.type in ("integer", "float", "unary_operator"):
            continue
        if operand.type == "call" and kernel.triton_name(field(operand, "function")) == "abs":
            continue
        title = f"Take the maximum of absolute values in tl.{called}"
        yield repair(title, call, VALUES, replaced(operand, f"tl.abs({text_of(operand)})"), rank=8)


def shifted_offset_repairs(site: Site) -> Iterator[Repair]:
    """Offsets without a constant at their end: ``x_ptr + cols`` for ``x_ptr + cols + 1``."""
    seen = set[int]()
    for node in pointers_of(site):
        for part in walk(node):
            left, right = field(part, "left"), field(part, "right")
            is_sum = part.type == "binary_operator" and text_of(field(part, "operator")) in ("+", "-")
            if not is_sum or left is None or right is None or right.type != "integer" or part.start_byte in seen:
                continue
            seen.add(part.start_byte)
            title = f"Leave {text_of(field(part, 'operator'))} {text_of(right)} out of the offset"
            yield repair(title, part, OFFSETS, replaced(part, text_of(left)), rank=4)


def program_step_repairs(site: Site) -> Iterator[Repair]:
    """Blocks by which the number of a program is multiplied, in place of another number or block."""
    kernel = site.kernel
    programs = {
        name
        for name, values in kernel.values.items()
        if any("program_id" in text_of(field(v, "function")) for v in values if v.type == "call")
    }
    blocks = [
        text_of(end)
        for called, call in kernel.calls
        if called == "arange" and (end := argument(call, 1, "end")) is not None and end.type == "identifier"
    ]
    for node in walk(kernel.body):
        left, right = field(node, "left"), field(node, "right")
        if node.type != "binary_operator" or text_of(field(node, "operator")) != "*" or left is None or right is None:
            continue
        if "program_id" not in text_of(left) and text_of(left) not in programs:
            continue
        if right.type == "integer" or text_of(right) in blocks:
            for rank, block in enumerate(b for b in dict.fromkeys(blocks) if b != text_of(right)):
                title = f"Start each program {block} elements after the one before instead of {text_of(right)}"
                yield repair(title, node, (*OFFSETS, FaultKind.RACE), replaced(right, block), rank=1 + rank)


def pointers_of(site: Site) -> Iterator[Node]:
    """Pointers of accesses, and what is assigned or added to their names."""
    kernel, names = site.kernel, set[str]()
    for called, call in kernel.calls:
        pointer = argument(call, 0, "pointer") if called in MEMORY else None
        if pointer is not None:
            names.update(names_in(pointer))
            yield pointer
    for node in walk(kernel.body):
        right = field(node, "right") if node.type in ("assignment", "augmented_assignment") else None
        if right is not None and text_of(field(node, "left")) in names:
            yield right
