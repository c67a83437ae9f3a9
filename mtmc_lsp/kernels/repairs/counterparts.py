"""Repairs by what is written in place of another: functions and operators, rows without their size, pointers that stay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tree_sitter import Node

from mtmc_lsp.kernels.messages import FaultKind
from mtmc_lsp.kernels.repairs.computations import OFFSETS, VALUES, pointers_of
from mtmc_lsp.kernels.repairs.site import MEMORY, Edit, Repair, Site, repair, replaced
from mtmc_lsp.source.lint.kernel import argument, names_in
from mtmc_lsp.source.syntax import field, line_start, text_of, walk

PAIRS = (
    ("max", "min"),
    ("maximum", "minimum"),
    ("argmax", "argmin"),
    ("sqrt", "rsqrt"),
    ("exp", "exp2"),
    ("log", "log2"),
    ("sin", "cos"),
)
COUNTERPARTS = {a: b for pair in PAIRS for a, b in (pair, pair[::-1])}
OPERATORS = {"+": "-", "-": "+", "*": "/", "/": "*"}
MOVED = (*OFFSETS, FaultKind.RACE, FaultKind.UNINITIALISED)


def function_repairs(site: Site) -> Iterator[Repair]:
    """A function in place of its counterpart: ``tl.max`` for ``tl.min``, ``tl.rsqrt`` for ``tl.sqrt``."""
    for name, call in site.kernel.calls:
        function = field(call, "function")
        node = field(function, "attribute") or function
        if node is not None and text_of(node) == name and name in COUNTERPARTS:
            other = COUNTERPARTS[name]
            yield repair(f"Call {other} instead of {name}", call, VALUES, replaced(node, other), rank=5)


def operator_repairs(site: Site) -> Iterator[Repair]:
    """An operator in place of its inverse, where values are computed and not offsets, masks or bounds of loops."""
    for node in _computed(site):
        operator = field(node, "operator")
        other = OPERATORS.get(text_of(operator))
        if operator is not None and other is not None:
            title = f"Compute {text_of(field(node, 'left'))} {other} {text_of(field(node, 'right'))}"
            yield repair(title[:80], node, VALUES, replaced(operator, other), rank=9)


def row_repairs(site: Site) -> Iterator[Repair]:
    """Rows of an offset times the size that other offsets multiply them by, or without it."""
    products: dict[str, list[str]] = {}
    bare, multiplied = list[Node](), list[Node]()
    for pointer in pointers_of(site):
        for term in _terms(pointer)[1:]:
            left, right = field(term, "left"), field(term, "right")
            if term.type == "identifier":
                bare.append(term)
            elif left is not None and right is not None and {left.type, right.type} == {"identifier"}:
                products.setdefault(text_of(left), []).append(text_of(right))
                multiplied.append(term)
    for term in bare:
        row = text_of(term)
        for rank, size in enumerate(dict.fromkeys(products.get(row, ()))):
            title = f"Multiply {row} by {size} in the offset"
            yield repair(title, term, OFFSETS, replaced(term, f"{row} * {size}"), rank=4 + rank)
    for term in multiplied:
        row = text_of(field(term, "left"))
        title = f"Leave * {text_of(field(term, 'right'))} out of the offset"
        yield repair(title, term, MOVED, replaced(term, row), rank=8)


def advance_repairs(site: Site) -> Iterator[Repair]:
    """A pointer that is moved to the program's row, as the others are."""
    moved: dict[str, list[Node]] = {}
    for node in walk(site.kernel.body):
        if node.type == "augmented_assignment" and text_of(field(node, "operator")) == "+=":
            moved.setdefault(text_of(field(node, "left")), []).append(node)
    steps = [node for name, nodes in moved.items() if name in site.kernel.parameters for node in nodes]
    used = dict.fromkeys(
        name
        for called, call in site.kernel.calls
        if called in MEMORY and (pointer := argument(call, 0, "pointer")) is not None
        for name in names_in(_terms(pointer)[0])
    )
    text = site.text
    read = {text_of(node) for node in walk(site.kernel.body) if node.type == "identifier"}
    # A stride that nothing reads tells by what the pointer was moved.
    unread = [
        name for name, parameter in site.kernel.parameters.items() if name not in read and not parameter.is_constexpr
    ]
    for name in used:
        if name in moved or name not in site.kernel.parameters:
            continue
        for number, step in enumerate(steps[::-1] if unread else ()):
            for other, line in _moves(site, step, name, unread):
                title = f"Move {name} as the other pointers, by {other}"
                at = text.find(b"\n", step.end_byte) + 1
                yield repair(title, step, MOVED, Edit(at, at, line), rank=number)
        for rank, step in enumerate(steps[::-1]):
            start, end = line_start(text, step.start_byte), text.find(b"\n", step.end_byte) + 1
            if not end:
                continue
            indent = text[start : step.start_byte].decode()
            line = f"{indent}{name} += {text_of(field(step, 'right'))}\n"
            yield repair(f"Move {name} as the other pointers", step, MOVED, Edit(end, end, line), rank=2 + rank)


def _moves(site: Site, step: Node, name: str, strides: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Lines that move another pointer like a statement does, by another stride; with the stride."""
    start, right = line_start(site.text, step.start_byte), field(step, "right")
    if right is None or b"\n" not in site.text[step.end_byte :]:
        return
    indent, whole = site.text[start : step.start_byte].decode(), text_of(right).encode()
    for node in walk(right):
        if text_of(node) in site.kernel.parameters:
            first, last = node.start_byte - right.start_byte, node.end_byte - right.start_byte
            for other in strides:
                amount = (whole[:first] + other.encode() + whole[last:]).decode()
                yield other, f"{indent}{name} += {amount}\n"


def _terms(node: Node) -> list[Node]:
    """The terms of a sum."""
    if node.type == "parenthesized_expression" and node.named_children:
        return _terms(node.named_children[0])
    left, right = field(node, "left"), field(node, "right")
    is_sum = node.type == "binary_operator" and text_of(field(node, "operator")) == "+"
    return [*_terms(left), *_terms(right)] if is_sum and left is not None and right is not None else [node]


def _computed(site: Site) -> Iterator[Node]:
    """Operations on values: what is assigned, added or stored, without what pointers and masks are made of."""
    kernel = site.kernel
    addresses = set[str]()
    for called, call in kernel.calls:
        if called in MEMORY:
            parts = [argument(call, 0, "pointer"), argument(call, 1 if called == "load" else 2, "mask")]
            addresses |= {name for part in parts if part is not None for name in names_in(part)}
    for _ in range(len(kernel.values)):
        more = {name for known in addresses for v in kernel.values.get(known, ()) for name in names_in(v)}
        if more <= addresses:
            break
        addresses |= more
    for node in walk(kernel.body):
        left, right = field(node, "left"), field(node, "right")
        roots = list[Node]()
        if node.type in ("assignment", "augmented_assignment") and right is not None and left is not None:
            if text_of(left) not in addresses:
                roots = [right]
        elif node.type == "call" and kernel.triton_name(field(node, "function")) == "store":
            value = argument(node, 1, "value")
            roots = [value] if value is not None else []
        for root in roots:
            yield from (part for part in _outside_memory(root, site) if part.type == "binary_operator")


def _outside_memory(node: Node, site: Site) -> Iterator[Node]:
    """A node and those below it, without loads, ranges and comparisons."""
    called = site.kernel.triton_name(field(node, "function")) if node.type == "call" else ""
    if called in ("load", "arange", "program_id") or node.type == "comparison_operator":
        return
    yield node
    for child in node.named_children:
        yield from _outside_memory(child, site)
