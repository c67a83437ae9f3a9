"""Repairs of stores that several programs make to one element, and of offsets."""

from __future__ import annotations

from collections.abc import Iterator

from tree_sitter import Node

from mtmc_lsp.kernels.messages import FaultKind
from mtmc_lsp.kernels.repairs.launches import allocation_repairs
from mtmc_lsp.kernels.repairs.site import ATOMICS, MEMORY, Edit, Repair, Site, repair, replaced
from mtmc_lsp.source.lint.kernel import argument, names_in
from mtmc_lsp.source.syntax import field, line_end, line_start, text_of, walk

RACES = (FaultKind.RACE, FaultKind.WRONG_VALUES)
OFFSETS = (
    FaultKind.WRONG_VALUES, FaultKind.READ_OUTSIDE, FaultKind.WRITE_OUTSIDE, FaultKind.NOT_WRITTEN, FaultKind.RACE,
)  # fmt: skip
COMBINING = {"+": "atomic_add", "maximum": "atomic_max", "minimum": "atomic_min"}
MOST_FACTORS = 24
"""Limit for the factors of one access that are replaced."""


def race_repairs(site: Site) -> Iterator[Repair]:
    """Stores to elements that other programs store to as well."""
    zeros = [edit for item in allocation_repairs(site) for edit in item.edits]
    for name, call in site.accesses:
        if name != "store":
            continue
        for title, edits in _atomic(site, call):
            yield repair(title, call, RACES, *edits)
            for zero in zeros:
                yield repair(f"{title}, and start with zeros", call, RACES, *edits, zero, rank=1)


def _atomic(site: Site, call: Node) -> Iterator[tuple[str, tuple[Edit, ...]]]:
    """The store as an atomic operation: of what it adds to the loaded value, or of the whole value."""
    function, pointer, value = field(call, "function"), argument(call, 0, "pointer"), argument(call, 1, "value")
    if function is None or pointer is None or value is None:
        return
    prefix = text_of(function).removesuffix("store")
    for operation, added, loaded in _combined(site, value, text_of(pointer)):
        removed = _without_statement(site, loaded)
        edits = (replaced(function, f"{prefix}{operation}"), replaced(value, added), *removed)
        yield f"Use tl.{operation}", edits
    yield "Use tl.atomic_add", (replaced(function, f"{prefix}atomic_add"),)


def _combined(site: Site, value: Node, pointer: str) -> Iterator[tuple[str, str, str]]:
    """Operations that combine the value at ``pointer`` with another one: their name, the other value, the loaded name."""
    kernel = site.kernel
    if value.type == "identifier":
        values = kernel.values.get(text_of(value), ())
        value = values[0] if len(values) == 1 else value
    if value.type == "binary_operator" and text_of(field(value, "operator")) == "+":
        operation, sides = "atomic_add", [field(value, "left"), field(value, "right")]
    elif value.type == "call" and kernel.triton_name(field(value, "function")) in COMBINING:
        operation = COMBINING[kernel.triton_name(field(value, "function"))]
        sides = [argument(value, 0, "x"), argument(value, 1, "y")]
    else:
        return
    for one, other in (sides, sides[::-1]):
        if one is None or other is None:
            continue
        loads = kernel.values.get(text_of(one), ()) if one.type == "identifier" else (one,)
        load = loads[0] if len(loads) == 1 and loads[0].type == "call" else None
        is_load = load is not None and kernel.triton_name(field(load, "function")) == "load"
        if load is not None and is_load and text_of(argument(load, 0, "pointer")) == pointer:
            yield operation, text_of(other), text_of(one) if one.type == "identifier" else ""


def _without_statement(site: Site, name: str) -> tuple[Edit, ...]:
    """The edit that removes the assignment of a name that is used once."""
    if not name:
        return ()
    uses = [used for node in [site.kernel.body] for used in names_in(node) if used == name]
    assigned = [
        node for node in walk(site.kernel.body) if node.type == "assignment" and text_of(field(node, "left")) == name
    ]
    if len(assigned) != 1 or len(uses) > 2:
        return ()
    node = assigned[0]
    return (Edit(line_start(site.text, node.start_byte), line_end(site.text, node.end_byte), ""),)


def _are_alike(one: str, other: str) -> bool:
    """Whether names differ in their last letter alone, as strides of one tensor do, or are single letters."""
    return one[:-1] == other[:-1]


def offset_repairs(site: Site) -> Iterator[Repair]:
    """Other strides in the offsets of an access, and other axes of the grid."""
    kernel = site.kernel
    seen: set[int] = set()
    for name, call in kernel.calls:
        pointer = argument(call, 0, "pointer") if name in (*MEMORY, *ATOMICS) else None
        if pointer is None:
            continue
        count = 0
        for source in kernel.sources(pointer):
            for node in walk(source):
                if node.type != "identifier" or node.id in seen or text_of(node) not in site.numbers:
                    continue
                seen.add(node.id)
                for other in site.numbers:
                    is_like = _are_alike(other, text_of(node))
                    if other != text_of(node) and (is_like or count < MOST_FACTORS):
                        count += not is_like
                        title = f"Use {other} instead of {text_of(node)} in the offset"
                        yield repair(title, node, OFFSETS, replaced(node, other), rank=4 if is_like else 7)
    programs = [call for name, call in kernel.calls if name == "program_id"]
    axes = [(axis, text_of(axis)) for call in programs if (axis := argument(call, 0, "axis")) is not None]
    for index, (first, one) in enumerate(axes):
        for second, two in axes[index + 1 :]:
            if one != two:
                edits = (replaced(first, two), replaced(second, one))
                yield repair("Swap the axes of the grid", first, OFFSETS, *edits, rank=5)
