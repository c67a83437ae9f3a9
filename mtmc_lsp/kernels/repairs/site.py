"""A kernel with its launches in the user's file, as the repairs read it, and the edits that they make."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from tree_sitter import Node

from mtmc_lsp.kernels.messages import FaultKind
from mtmc_lsp.source.lint import Context, context_of
from mtmc_lsp.source.lint.grids import assigned_values
from mtmc_lsp.source.lint.kernel import Kernel, argument, kernels_in, names_in
from mtmc_lsp.source.lint.launchers import functions, launches
from mtmc_lsp.source.outline import Outliner
from mtmc_lsp.source.syntax import field, line_of, parse, text_of, walk

MOST_LINES = 5
"""Most lines that a repair may change."""
MEMORY = ("load", "store")
ATOMICS = ("atomic_add", "atomic_max", "atomic_min", "atomic_and", "atomic_or", "atomic_xchg")


@dataclass(frozen=True)
class Edit:
    """One replaced range of bytes."""

    start: int
    end: int
    new: str


@dataclass(frozen=True)
class Repair:
    """A candidate: edits that may remove a fault."""

    title: str
    edits: tuple[Edit, ...]
    line: int
    """1-based line of the first edit."""
    kinds: frozenset[FaultKind]
    """The faults that it may remove."""
    rank: int = 0
    """Order among the repairs of one kind of fault: lower first."""

    def applied(self, text: bytes) -> bytes:
        """The text with the edits."""
        for edit in sorted(self.edits, key=lambda edit: edit.start, reverse=True):
            text = text[: edit.start] + edit.new.encode() + text[edit.end :]
        return text


def replaced(node: Node, new: str) -> Edit:
    """The edit that replaces a node."""
    return Edit(node.start_byte, node.end_byte, new)


def appended(call: Node, text: str) -> Edit:
    """The edit that adds an argument to a call."""
    arguments = field(call, "arguments")
    assert arguments is not None
    items = arguments.named_children
    end = arguments.end_byte - 1
    if not items:
        return Edit(end, end, text)
    last = items[-1].end_byte
    return Edit(last, last, f", {text}")


def repair(title: str, node: Node, kinds: Iterable[FaultKind], *edits: Edit, rank: int = 0) -> Repair:
    """A repair at the line of a node."""
    return Repair(title, edits, line_of(node), frozenset(kinds), rank)


@dataclass(frozen=True)
class Launch:
    """A launch ``kernel[grid](...)`` in a function."""

    call: Node
    function: Node

    @cached_property
    def values(self) -> dict[str, list[Node]]:
        """Local names of the function to the expressions that are assigned to them."""
        return dict(assigned_values(self.function))

    @property
    def grid(self) -> Node | None:
        """The expression of the grid: of a name its value, of a lambda its body."""
        grid = field(field(self.call, "function"), "subscript")
        if grid is not None and grid.type == "identifier":
            values = self.values.get(text_of(grid), [])
            grid = values[0] if len(values) == 1 else None
        return field(grid, "body") if grid is not None and grid.type == "lambda" else grid

    @property
    def positional(self) -> list[Node]:
        """The arguments that are passed by position."""
        arguments = field(self.call, "arguments")
        items = arguments.named_children if arguments is not None else []
        return [item for item in items if item.type not in ("comment", "keyword_argument")]

    @property
    def keywords(self) -> dict[str, Node]:
        """The arguments that are passed by keyword."""
        arguments = field(self.call, "arguments")
        items = arguments.named_children if arguments is not None else []
        pairs = [(field(i, "name"), field(i, "value")) for i in items if i.type == "keyword_argument"]
        return {text_of(name): value for name, value in pairs if value is not None}

    def passed(self, kernel: Kernel) -> dict[str, Node]:
        """Parameters of the kernel to the arguments."""
        return {**dict(zip(kernel.parameters, self.positional, strict=False)), **self.keywords}


@dataclass(frozen=True)
class Site:
    """One kernel and its launches."""

    kernel: Kernel
    launches: tuple[Launch, ...]
    text: bytes

    @cached_property
    def accesses(self) -> list[tuple[str, Node]]:
        """Loads and stores, in the order of the text."""
        return [(name, call) for name, call in self.kernel.calls if name in MEMORY]

    @cached_property
    def pointers(self) -> frozenset[str]:
        """The parameters that are pointers."""
        names = set()
        for name, call in self.kernel.calls:
            pointer = argument(call, 0, "pointer") if name in (*MEMORY, *ATOMICS) else None
            names |= self._bases(pointer, 0) if pointer is not None else set()
        return frozenset(names)

    def bases(self, pointer: Node) -> list[str]:
        """The parameters that a pointer expression starts from."""
        return sorted(self._bases(pointer, 0))

    def _bases(self, node: Node, depth: int) -> set[str]:
        """The parameters at the left end of a sum."""
        while node.type in ("binary_operator", "parenthesized_expression"):
            if node.type == "binary_operator" and text_of(field(node, "operator")) not in ("+", "-"):
                return set()
            node = (field(node, "left") if node.type == "binary_operator" else node.named_children[0]) or node
        name = text_of(node)
        if node.type != "identifier" or depth > 4:
            return set()
        if name in self.kernel.parameters:
            return {name}
        return set().union(*(self._bases(value, depth + 1) for value in self.kernel.values.get(name, ())))

    @cached_property
    def numbers(self) -> list[str]:
        """Parameters that may be bounds: sizes, then compile-time constants, then strides."""
        kernel = self.kernel
        compared = {
            name
            for node in walk(kernel.body)
            if node.type == "comparison_operator"
            for name in names_in(node.named_children[-1])
        }
        blocks = {name for _, call in kernel.calls for name in _shape_names(call)}
        candidates = [p for p in kernel.parameters.values() if p.name not in self.pointers and p.name not in blocks]
        return [
            p.name
            for p in sorted(
                candidates, key=lambda p: ("stride" in p.name.lower(), p.is_constexpr, p.name not in compared)
            )
        ]

    def terms(self, pointer: Node) -> list[Node]:
        """The blocks of offsets in a pointer expression, with their subscripts: ``offs_m[:, None]``."""
        kernel, found, seen = self.kernel, list[Node](), set[str]()
        pending = [pointer]
        while pending:
            node = pending.pop(0)
            inner = node
            while inner.type == "subscript":
                inner = field(inner, "value") or inner.named_children[0]
            if inner.type == "identifier":
                name = text_of(inner)
                values = kernel.values.get(name, ())
                if name in seen:
                    continue
                seen.add(name)
                if any(self._bases(value, 0) & self.pointers for value in values):
                    pending = [*values, *pending]
                elif kernel.is_block(inner):
                    found.append(node)
            elif node.type not in ("call", "string"):
                pending = [*node.named_children, *pending]
        return found

    @cached_property
    def masks(self) -> list[tuple[str, int]]:
        """Names that hold masks, with the end of their assignment."""
        kernel = self.kernel
        return [
            (name, values[-1].end_byte)
            for name, values in kernel.values.items()
            if values and all(is_mask(value) for value in values)
        ]

    def bounds_of(self, term: Node) -> list[str]:
        """Bounds that a block of offsets may have: those that it is compared with elsewhere first."""
        base = text_of(term).partition("[")[0]
        known = [
            text_of(node.named_children[1])
            for node in walk(self.kernel.body)
            if node.type == "comparison_operator"
            and len(node.named_children) == 2
            and text_of(node.named_children[0]).lstrip("(").partition("[")[0] == base
        ]
        return [*dict.fromkeys([*known, *self.numbers])]


def with_helpers(sites: Sequence[Site], names: Sequence[str]) -> tuple[str, ...]:
    """The named kernels, and the ``@triton.jit`` functions that they call, in the order of the file."""
    called = {site.kernel.name: set(names_in(site.kernel.body)) for site in sites}
    reached, pending = set(names), [*names]
    while pending:
        further = called.get(pending.pop(), set()) & called.keys() - reached
        reached |= further
        pending += further
    return tuple(site.kernel.name for site in sites if site.kernel.name in reached)


def is_mask(node: Node) -> bool:
    """Whether an expression is a comparison, or a combination of comparisons."""
    if node.type == "parenthesized_expression":
        return is_mask(node.named_children[0])
    if node.type == "binary_operator" and text_of(field(node, "operator")) in ("&", "|"):
        return any(is_mask(child) for child in node.named_children)
    return node.type == "comparison_operator"


def _shape_names(call: Node) -> Iterator[str]:
    if text_of(field(call, "function")).rpartition(".")[2] in ("arange", "zeros", "full"):
        arguments = field(call, "arguments")
        yield from names_in(arguments) if arguments is not None else ()


def sites_of(path: str, text: bytes, names: Sequence[str] | None = None) -> list[Site]:
    """The kernels of a file with their launches; with ``names`` only these kernels."""
    root = parse(text)
    context: Context = context_of(Outliner(path).outline(text, root))
    calls: dict[str, list[Launch]] = {}
    for function in functions(root):
        for call in launches(function, context):
            calls.setdefault(text_of(field(field(call, "function"), "value")), []).append(Launch(call, function))
    kernels = [kernel for kernel in kernels_in(root, context) if names is None or kernel.name in names]
    return [Site(kernel, tuple(calls.get(kernel.name, ())), text) for kernel in kernels]
