"""Repairs of values: padding that enters a reduction, accumulators of 16 bits, wrong initial values."""

from __future__ import annotations

from collections.abc import Iterator

from tree_sitter import Node

from mtmc_lsp.kernels.messages import FaultKind
from mtmc_lsp.kernels.repairs.site import Edit, Repair, Site, appended, repair, replaced
from mtmc_lsp.source.lint.kernel import argument, names_in
from mtmc_lsp.source.lint.precision import SMALL_FLOATS
from mtmc_lsp.source.syntax import field, text_of, walk

LOWEST, HIGHEST = 'float("-inf")', 'float("inf")'
NEUTRAL = {"sum": "0.0", "max": LOWEST, "min": HIGHEST, "argmax": LOWEST, "argmin": HIGHEST, "cumsum": "0.0"}
"""Reductions to the value that does not change their result."""
FILLINGS = ("0.0", LOWEST, HIGHEST, "1.0")
PADDING = (FaultKind.WRONG_VALUES, FaultKind.UNDEFINED_LANES)
VALUES = (FaultKind.WRONG_VALUES,)


def padding_repairs(site: Site) -> Iterator[Repair]:
    """Other values for lanes outside the mask of a load."""
    for name, call in site.accesses:
        if name != "load" or argument(call, 1, "mask") is None:
            continue
        other = argument(call, 2, "other")
        for rank, value in enumerate(FILLINGS):
            if other is None:
                title = f"Fill the lanes outside the mask with {value}"
                yield repair(title, call, PADDING, appended(call, f"other={value}"), rank=rank)
            elif text_of(other) != value:
                title = f"Fill the lanes outside the mask with {value} instead of {text_of(other)}"
                yield repair(title, call, PADDING, replaced(other, value), rank=rank)


def reduction_repairs(site: Site) -> Iterator[Repair]:
    """Lanes outside the mask that are left out of a reduction."""
    for name, call in site.kernel.calls:
        operand = argument(call, 0, "input")
        if name not in NEUTRAL or operand is None:
            continue
        neutral = NEUTRAL[name]
        if operand.type == "call" and site.kernel.triton_name(field(operand, "function")) == "where":
            filling = argument(operand, 2, "y")
            if filling is not None and text_of(filling) != neutral:
                title = f"Leave the other lanes out of tl.{name}"
                yield repair(title, call, PADDING, replaced(filling, neutral))
            continue
        for rank, mask in enumerate(_masks_before(site, call)):
            new = f"tl.where({mask}, {text_of(operand)}, {neutral})"
            title = f"Leave lanes outside {mask} out of tl.{name}"
            yield repair(title, call, PADDING, replaced(operand, new), rank=4 + rank)
    for name, call in site.kernel.calls:
        filling = argument(call, 2, "y") if name == "where" else None
        for rank, value in enumerate(FILLINGS[:3] if filling is not None else ()):
            if filling is not None and text_of(filling) != value:
                title = f"Fill the lanes outside the mask with {value} instead of {text_of(filling)}"
                yield repair(title, call, PADDING, replaced(filling, value), rank=5 + rank)


def accumulation_repairs(site: Site) -> Iterator[Repair]:
    """Lanes outside the mask that are left out where a loop adds values up."""
    for node in walk(site.kernel.body):
        right = field(node, "right") if node.type == "augmented_assignment" else None
        if right is None or text_of(field(node, "operator")) != "+=":
            continue
        for rank, mask in enumerate(_masks_before(site, node)):
            new = f"tl.where({mask}, {text_of(right)}, 0.0)"
            title = f"Leave lanes outside {mask} out of {text_of(field(node, 'left'))}"
            yield repair(title, node, PADDING, replaced(right, new), rank=4 + rank)


def _masks_before(site: Site, call: Node) -> list[str]:
    named = [name for name, end in site.masks if end < call.start_byte]
    direct = [
        text_of(mask)
        for name, load in site.accesses
        if name == "load" and load.start_byte < call.start_byte and (mask := argument(load, 1, "mask")) is not None
    ]
    # The nearest mask first: names are often assigned again in the next loop.
    return [*dict.fromkeys([*named, *direct][::-1])]


def accumulator_repairs(site: Site) -> Iterator[Repair]:
    """Accumulators of 16 bits, and values that are rounded before they are added up."""
    kernel = site.kernel
    for node in walk(kernel.body):
        if node.type not in ("attribute", "identifier") or kernel.triton_name(node) not in SMALL_FLOATS:
            continue
        new = text_of(node).replace(kernel.triton_name(node), "float32")
        yield repair("Accumulate in float32", node, VALUES, replaced(node, new), rank=1)
    reduces = any(name in NEUTRAL or name == "dot" for name, _ in kernel.calls)
    for name, call in site.accesses if reduces else ():
        if name == "load":
            end = call.end_byte
            title = "Convert to float32 before the reduction"
            yield repair(title, call, VALUES, Edit(end, end, ".to(tl.float32)"), rank=6)
    for name, call in kernel.calls:
        dtype = argument(call, 2, "out_dtype") if name == "dot" else None
        if dtype is not None and text_of(dtype) != "tl.float32":
            yield repair("Accumulate in float32", call, VALUES, replaced(dtype, "tl.float32"))


def initial_value_repairs(site: Site) -> Iterator[Repair]:
    """Initial values of running maxima and minima, and accumulators that a loop overwrites."""
    kernel = site.kernel
    for name, values in kernel.values.items():
        if len(values) < 2:
            continue
        combined = {kernel.triton_name(field(v, "function")) for v in values[1:] if v.type == "call"}
        neutral = LOWEST if combined & {"maximum", "max"} else HIGHEST if combined & {"minimum", "min"} else ""
        first = values[0]
        if neutral and first.type != "call" and text_of(first) != neutral:
            yield repair(f"Start {name} with {neutral}", first, VALUES, replaced(first, neutral))
        elif neutral and kernel.triton_name(field(first, "function")) in ("zeros", "full"):
            shape = text_of(argument(first, 0, "shape"))
            is_full = kernel.triton_name(field(first, "function")) == "full"
            dtype = text_of(argument(first, 2 if is_full else 1, "dtype")) or "tl.float32"
            new = f"tl.full({shape}, {neutral}, dtype={dtype})"
            if new == text_of(first):
                continue
            yield repair(f"Start {name} with {neutral}", first, VALUES, replaced(first, new))
    for node in walk(kernel.body):
        left, right = field(node, "left"), field(node, "right")
        if node.type != "assignment" or left is None or right is None or left.type != "identifier":
            continue
        values = kernel.values.get(text_of(left), ())
        is_first = not values or values[0].start_byte == right.start_byte
        in_loop = any(True for _ in kernel.enclosing.ancestors(node, "for_statement", "while_statement"))
        if in_loop and not is_first and text_of(left) not in set(names_in(right)):
            operator = next((child for child in node.children if text_of(child) == "="), None)
            if operator is not None:
                title = f"Add to {text_of(left)} instead of replacing it"
                yield repair(title, node, VALUES, replaced(operator, "+="), rank=2)
