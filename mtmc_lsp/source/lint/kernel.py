"""Analysis of a Triton kernel for the checks: parameters, data flow between names, and which values are blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from tree_sitter import Node

from mtmc_lsp.source.lint.finding import Context
from mtmc_lsp.source.syntax import field, text_of, walk, with_decorators

ENCLOSING = frozenset("function_definition if_statement conditional_expression for_statement while_statement".split())
"""Types of nodes that :class:`Enclosing` finds."""
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
    def enclosing(self) -> Enclosing:
        """Conditions and loops around the nodes of the body."""
        return Enclosing(self.body)

    @cached_property
    def _blocks(self) -> dict[tuple[str, int], bool]:
        """Cache of ``is_block`` for names: a name can occur as often as it has values."""
        return {}

    @cached_property
    def loop_names(self) -> frozenset[str]:
        """Names bound by loops."""
        loops = (field(node, "left") for node in walk(self.body) if node.type == "for_statement")
        return frozenset(text_of(i) for left in loops if left is not None for i in walk(left) if i.type == "identifier")

    def sources(self, *nodes: Node) -> list[Node]:
        """The expressions and all expressions assigned to the names they depend on, directly or indirectly."""
        visited: set[str] = set()
        # One assignment can give values to many names: `a, b = f(...)`.
        expressions = {node.id: node for node in nodes}
        pending = [*nodes]
        while pending:
            for name in names_in(pending.pop()):
                if name in visited:
                    continue
                visited.add(name)
                for value in self.values.get(name, ()):
                    if value.id not in expressions:
                        expressions[value.id] = value
                        pending.append(value)
        return [*expressions.values()]

    @cached_property
    def names_from_parameters(self) -> frozenset[str]:
        """Names that depend on parameters, and the parameters."""
        return self._dependents(self.parameters.keys())

    @cached_property
    def names_from_loops(self) -> frozenset[str]:
        """Names that depend on loop variables, and these variables."""
        return self._dependents(self.loop_names)

    @cached_property
    def _users(self) -> dict[str, set[str]]:
        """Name to the names that are assigned expressions with it."""
        users: dict[str, set[str]] = {}
        names_of: dict[int, frozenset[str]] = {}
        for name, values in self.values.items():
            for value in values:
                if value.id not in names_of:
                    names_of[value.id] = frozenset(names_in(value))
                for used in names_of[value.id]:
                    users.setdefault(used, set()).add(name)
        return users

    def _dependents(self, names: Iterable[str]) -> frozenset[str]:
        """The names, and all names that depend on them directly or indirectly."""
        dependents = set(names)
        pending = [*dependents]
        while pending:
            new = self._users.get(pending.pop(), set()) - dependents
            dependents |= new
            pending.extend(new)
        return frozenset(dependents)

    def is_block(self, node: Node, depth: int = 8) -> bool:
        """Whether an expression is certainly a block and not a scalar."""
        if depth == 0:
            return False
        kind = node.type
        if kind == "identifier":
            key = (text_of(node), depth)
            if key not in self._blocks:
                values = self.values.get(key[0], ())
                # A name counts as a block only if all its values are blocks.
                self._blocks[key] = bool(values) and all(self.is_block(value, depth - 1) for value in values)
            return self._blocks[key]
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
    pending = [node]
    while pending:
        item = pending.pop()
        kind = item.type
        if kind == "identifier":
            yield text_of(item)
        elif kind in ("attribute", "keyword_argument"):
            part = field(item, "object" if kind == "attribute" else "value")
            pending += [part] if part is not None else []
        else:
            pending.extend(reversed(item.children))


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


class Enclosing:
    """The functions, conditions and loops around each node inside ``within``.

    ``Node.parent`` searches from the root of the tree, so following it upwards takes quadratic time in long expressions.
    """

    def __init__(self, within: Node) -> None:
        self._innermost: dict[int, Node] = {}
        pending: list[tuple[Node, Node | None]] = [(child, None) for child in within.children]
        while pending:
            node, outer = pending.pop()
            if outer is not None:
                self._innermost[node.id] = outer
            inner = node if node.type in ENCLOSING else outer
            pending.extend((child, inner) for child in node.children)

    def ancestors(self, node: Node, *kinds: str) -> Iterator[Node]:
        """Ancestors of a node with one of these types out of ``ENCLOSING``, innermost first."""
        outer = self._innermost.get(node.id)
        while outer is not None:
            if outer.type in kinds:
                yield outer
            outer = self._innermost.get(outer.id)


def _parameter(node: Node) -> KernelParameter | None:
    kind = node.type
    name_node = node if kind == "identifier" else field(node, "name")
    if name_node is None and kind == "typed_parameter":
        name_node = node.named_children[0]
    if name_node is None or name_node.type != "identifier":
        return None
    return KernelParameter(text_of(name_node), node, text_of(field(node, "type")), text_of(field(node, "value")))
