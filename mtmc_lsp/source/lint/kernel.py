"""Analysis of a Triton kernel for the checks: parameters, data flow between names, and which values are blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from tree_sitter import Node

from mtmc_lsp.source.lint.finding import Context
from mtmc_lsp.source.syntax import field, text_of, walk, with_decorators

REDUCTIONS = frozenset("sum max min argmax argmin reduce xor_sum program_id num_programs cdiv static_range".split())
"""Triton functions that may reduce a block to a scalar, or never return a block."""
MODULES = ("triton.language", "triton.language.core", "triton.language.math")


@dataclass(frozen=True)
class KernelParameter:
    """A parameter of a kernel."""

    name: str
    node: Node
    annotation: str
    default: str

    @property
    def is_constexpr(self) -> bool:
        """Whether its value is known at compile time."""
        return "constexpr" in self.annotation


@dataclass(frozen=True)
class Kernel:
    """A ``@triton.jit`` function."""

    node: Node
    context: Context

    @cached_property
    def name(self) -> str:
        """Name of the kernel."""
        return text_of(field(self.node, "name"))

    @cached_property
    def body(self) -> Node:
        """Body of the function."""
        return field(self.node, "body") or self.node

    @cached_property
    def decorators(self) -> tuple[Node, ...]:
        """Decorators, outermost first."""
        return tuple(item for item in with_decorators(self.node).children if item.type == "decorator")

    @cached_property
    def parameters(self) -> dict[str, KernelParameter]:
        """Parameters by name."""
        parameters = field(self.node, "parameters")
        return {
            p.name: p
            for p in map(_parameter, parameters.named_children if parameters is not None else ())
            if p is not None
        }

    @cached_property
    def calls(self) -> tuple[tuple[str, Node], ...]:
        """Calls of Triton functions: their names and nodes."""
        named_calls = ((self.triton_name(field(n, "function")), n) for n in walk(self.body) if n.type == "call")
        return tuple((name, node) for name, node in named_calls if name)

    def triton_name(self, function: Node | None) -> str:
        """``load`` for ``tl.load``; empty if the function is not from ``triton.language``."""
        if function is None or function.type not in ("attribute", "identifier"):
            return ""
        head, _, name = text_of(function).rpartition(".")
        if not head:
            path = self.context.imports.get(name, "")
            return path.rpartition(".")[2] if path.rpartition(".")[0] in MODULES else ""
        first, _, rest = head.partition(".")
        path = self.context.imports.get(first, first)
        return name if ".".join(part for part in (path, rest) if part) in MODULES else ""

    @cached_property
    def values(self) -> dict[str, tuple[Node, ...]]:
        """Local name to all expressions assigned to it, including by ``+=``."""
        values: dict[str, list[Node]] = {}
        for node in walk(self.body):
            if node.type in ("assignment", "augmented_assignment"):
                left, right = field(node, "left"), field(node, "right")
                if left is not None and right is not None and left.type == "identifier":
                    values.setdefault(text_of(left), []).append(right)
                elif left is not None and right is not None:
                    # `a, b = f(...)`: the individual values are unknown.
                    for item in walk(left):
                        if item.type == "identifier":
                            values.setdefault(text_of(item), []).append(right)
        return {name: tuple(nodes) for name, nodes in values.items()}

    @cached_property
    def loop_names(self) -> frozenset[str]:
        """Names bound by loops."""
        loops = (field(node, "left") for node in walk(self.body) if node.type == "for_statement")
        return frozenset(text_of(i) for left in loops if left is not None for i in walk(left) if i.type == "identifier")

    def sources(self, node: Node) -> list[Node]:
        """The expression and all expressions assigned to the names it depends on, directly or indirectly."""
        visited: set[str] = set()
        pending, sources = [node], []
        while pending:
            item = pending.pop()
            sources.append(item)
            for name in names_in(item):
                if name not in visited:
                    visited.add(name)
                    pending.extend(self.values.get(name, ()))
        return sources

    def dependencies(self, node: Node) -> set[str]:
        """Every name that an expression depends on, directly or indirectly."""
        return {name for source in self.sources(node) for name in names_in(source)}

    def is_block(self, node: Node, depth: int = 8) -> bool:
        """Whether an expression is certainly a block and not a scalar."""
        if depth == 0:
            return False
        kind = node.type
        if kind == "identifier":
            values = self.values.get(text_of(node), ())
            # A name counts as a block only if all its values are blocks.
            return bool(values) and all(self.is_block(value, depth - 1) for value in values)
        if kind == "parenthesized_expression":
            return any(self.is_block(child, depth) for child in node.named_children)
        if kind in ("binary_operator", "comparison_operator", "unary_operator"):
            return any(self.is_block(child, depth - 1) for child in node.named_children)
        if kind == "call":
            name = self.triton_name(field(node, "function"))
            if name in ("arange", "zeros_like") or (name == "load" and self._loads_block(node, depth)):
                return True
        return False

    def _loads_block(self, node: Node, depth: int) -> bool:
        pointer = argument(node, 0, "pointer")
        return pointer is not None and self.is_block(pointer, depth - 1)


def kernels_in(root: Node, context: Context) -> Iterator[Kernel]:
    """The kernels in a top-level statement."""
    for node in walk(root):
        if node.type == "function_definition" and text_of(field(node, "name")) in context.kernels:
            decorators = [i for i in with_decorators(node).children if i.type == "decorator"]
            if any("jit" in text_of(item) for item in decorators):
                yield Kernel(node, context)


def names_in(node: Node) -> Iterator[str]:
    """Identifiers in an expression, without attribute names and keyword names."""
    for item in walk(node):
        if item.type != "identifier":
            continue
        parent = item.parent
        if parent is not None and parent.type == "attribute" and field(parent, "attribute") == item:
            continue
        if parent is not None and parent.type == "keyword_argument" and field(parent, "name") == item:
            continue
        yield text_of(item)


def argument(call: Node, position: int, keyword: str) -> Node | None:
    """An argument of a call, passed by position or keyword."""
    arguments = field(call, "arguments")
    if arguments is None or arguments.type != "argument_list":
        return None
    positional = []
    for child in arguments.named_children:
        if child.type == "keyword_argument":
            if text_of(field(child, "name")) == keyword:
                return field(child, "value")
        elif child.type != "comment":
            positional.append(child)
    return positional[position] if position < len(positional) else None


def ancestors(node: Node, kind: str, within: Node) -> Iterator[Node]:
    """Ancestors of a node with the given type, innermost first, up to ``within``."""
    item = node.parent
    while item is not None and item != within:
        if item.type == kind:
            yield item
        item = item.parent


def _parameter(node: Node) -> KernelParameter | None:
    kind = node.type
    name_node = node if kind == "identifier" else field(node, "name")
    if name_node is None and kind == "typed_parameter":
        name_node = node.named_children[0]
    if name_node is None or name_node.type != "identifier":
        return None
    return KernelParameter(text_of(name_node), node, text_of(field(node, "type")), text_of(field(node, "value")))
