"""What a kernel does, read from its syntax tree: accesses with their index expressions and masks, loops, products, reductions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from tree_sitter import Node

from mtmc_lsp.kernels.repairs.site import ATOMICS, MEMORY, Site, sites_of
from mtmc_lsp.kernels.repairs.values import NEUTRAL
from mtmc_lsp.source.lint.kernel import argument
from mtmc_lsp.source.syntax import field, line_of, text_of, walk

MOST_DEPTH = 4
"""How far the names of a pointer are replaced by their values."""
MOST_TEXT = 200
"""Longer index expressions keep their names."""


class OperationKind(Enum):
    """Kind of an operation."""

    LOAD = "load"
    STORE = "store"
    ATOMIC = "atomic"
    PRODUCT = "product"
    REDUCTION = "reduction"
    LOOP = "loop"


@dataclass(frozen=True)
class Operation:
    """One operation of a kernel."""

    kind: OperationKind
    line: int
    """1-based line in the file."""
    text: str
    """The operands of a product or reduction, the range of a loop, the pointer of an access."""
    tensor: str = ""
    """The kernel's parameter that an access belongs to; empty if it is unknown."""
    index: str = ""
    """The offset of an access, with names replaced by what they were assigned."""
    mask: str = ""
    other: str = ""
    depth: int = 0
    """The number of loops around it."""


@dataclass(frozen=True)
class KernelReading:
    """A kernel as a list of operations in the order of the text."""

    name: str
    line: int
    operations: tuple[Operation, ...]

    def at(self, line: int, kind: OperationKind) -> Operation | None:
        """The operation of a kind in a line."""
        return next((item for item in self.operations if item.line == line and item.kind is kind), None)


def read_kernels(path: str, text: bytes, names: tuple[str, ...] | None = None) -> list[KernelReading]:
    """The kernels of a file; with ``names`` only these."""
    return [
        KernelReading(
            site.kernel.name,
            line_of(site.kernel.node),
            tuple(sorted(_operations(site), key=lambda operation: operation.line)),
        )
        for site in sites_of(path, text, names)
    ]


def _operations(site: Site) -> Iterator[Operation]:
    kernel = site.kernel

    def depth(node: Node) -> int:
        return sum(1 for _ in kernel.enclosing.ancestors(node, "for_statement", "while_statement"))

    for name, call in kernel.calls:
        first = argument(call, 0, "pointer")
        if first is None:
            continue
        if name in (*MEMORY, *ATOMICS):
            kind = OperationKind(name) if name in MEMORY else OperationKind.ATOMIC
            mask = argument(call, 1 if name == "load" else 2, "mask")
            other = argument(call, 2, "other") if name == "load" else None
            bases = site.bases(first)
            index = _expanded(site, first, MOST_DEPTH)
            yield Operation(
                kind,
                line_of(call),
                text_of(first),
                bases[0] if bases else "",
                index,
                text_of(mask),
                text_of(other),
                depth(call),
            )
        elif name == "dot":
            other_operand = argument(call, 1, "other")
            operands = f"{text_of(first)} @ {text_of(other_operand)}"
            yield Operation(OperationKind.PRODUCT, line_of(call), operands, depth=depth(call))
        elif name in NEUTRAL:
            yield Operation(OperationKind.REDUCTION, line_of(call), f"{name} of {text_of(first)}", depth=depth(call))
    for node in walk(kernel.body):
        if node.type in ("for_statement", "while_statement"):
            steps = field(node, "right") or field(node, "condition")
            yield Operation(OperationKind.LOOP, line_of(node), text_of(steps), depth=depth(node))


def _expanded(site: Site, node: Node, depth: int) -> str:
    """The text of an expression, with each name that is assigned once replaced by its value."""
    text = _replaced(site, node, depth)
    return text if len(text) <= MOST_TEXT else text_of(node)


def _replaced(site: Site, node: Node, depth: int) -> str:
    if node.type == "identifier":
        values = site.kernel.values.get(text_of(node), ())
        if (
            depth
            and len(values) == 1
            and not any(call.type == "call" and _is_memory(site, call) for call in walk(values[0]))
        ):
            inner = _replaced(site, values[0], depth - 1)
            return f"({inner})" if values[0].type == "binary_operator" else inner
        return text_of(node)
    if not node.named_children or node.type in ("string", "keyword_argument", "attribute"):
        return text_of(node)
    pieces, end = [], node.start_byte
    for child in node.children:
        pieces += [site.text[end : child.start_byte].decode(), _replaced(site, child, depth)]
        end = child.end_byte
    return " ".join("".join([*pieces, site.text[end : node.end_byte].decode()]).split())


def _is_memory(site: Site, call: Node) -> bool:
    return site.kernel.triton_name(field(call, "function")) in (*MEMORY, *ATOMICS)
