"""What a kernel does, read from its syntax tree: accesses with their index expressions and masks, loops, products, reductions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
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
DESCRIPTOR_MASK = "bounds of the descriptor"
"""Stands for the mask of an access by a descriptor."""
DESCRIPTOR_MAKERS = ("make_tensor_descriptor", "_experimental_make_tensor_descriptor")


class OperationKind(Enum):
    """Kind of an operation."""

    LOAD = "load"
    STORE = "store"
    ATOMIC = "atomic"
    PRODUCT = "product"
    REDUCTION = "reduction"
    LOOP = "loop"


DESCRIPTOR_FUNCTIONS = {
    "load_tensor_descriptor": OperationKind.LOAD,
    "store_tensor_descriptor": OperationKind.STORE,
    "_experimental_descriptor_load": OperationKind.LOAD,
    "_experimental_descriptor_store": OperationKind.STORE,
}


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
        descriptor = _descriptor_access(site, node) if node.type == "call" else None
        if descriptor is not None:
            yield replace(descriptor, depth=depth(node))
        if node.type in ("for_statement", "while_statement"):
            steps = field(node, "right") or field(node, "condition")
            yield Operation(OperationKind.LOOP, line_of(node), text_of(steps), depth=depth(node))


def _descriptor_access(site: Site, call: Node) -> Operation | None:
    """A load or store by a tensor descriptor: ``a_desc.load([m, k])``, also as a function of ``triton.language``.

    A descriptor knows the sizes of its tensor, so that it needs no mask.
    """
    function = field(call, "function")
    name = site.kernel.triton_name(function)
    if name in DESCRIPTOR_FUNCTIONS:
        kind, descriptor = DESCRIPTOR_FUNCTIONS[name], argument(call, 0, "desc")
        # A stored value stands before the offsets or after them.
        offsets = next((item for item in _arguments(call) if item.type in ("list", "tuple")), None)
    elif not name and function is not None and function.type == "attribute":
        method, descriptor = text_of(field(function, "attribute")), field(function, "object")
        offsets = next(iter(_arguments(call)), None)
        if method not in MEMORY or descriptor is None or offsets is None:
            return None
        kind = OperationKind(method)
    else:
        return None
    if descriptor is None or descriptor.type != "identifier" or offsets is None:
        return None
    tensor = _described_tensor(site, descriptor)
    if not tensor:
        return None
    inner = _expanded(site, offsets, MOST_DEPTH)
    return Operation(kind, line_of(call), text_of(descriptor), tensor, inner, DESCRIPTOR_MASK)


def _arguments(call: Node) -> list[Node]:
    arguments = field(call, "arguments")
    return [] if arguments is None else [item for item in arguments.named_children if item.type != "comment"]


def _described_tensor(site: Site, descriptor: Node) -> str:
    """The parameter that a descriptor describes: the pointer that it was made from, or the descriptor itself."""
    name = text_of(descriptor)
    made = [
        base
        for value in site.kernel.values.get(name, ())
        if value.type == "call"
        and site.kernel.triton_name(field(value, "function")) in DESCRIPTOR_MAKERS
        and (pointer := argument(value, 0, "base")) is not None
        for base in site.bases(pointer)
    ]
    return made[0] if made else name if name in site.kernel.parameters else ""


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
