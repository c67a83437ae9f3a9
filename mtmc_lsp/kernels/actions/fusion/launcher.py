"""The function around a launch: where it makes, uses and describes a tensor."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from tree_sitter import Node

from mtmc_lsp.kernels.actions.base import Facts
from mtmc_lsp.kernels.actions.signatures import is_called, is_splatted
from mtmc_lsp.kernels.repairs.site import ATOMICS, MEMORY, Launch
from mtmc_lsp.source.lint.kernel import argument
from mtmc_lsp.source.syntax import field, text_of, walk

DESCRIPTIONS = frozenset("shape dtype device stride size numel ndim dim element_size is_contiguous is_cuda".split())
"""Attributes and methods of a tensor that do not read its elements."""
LAUNCH_US = 4.0
"""Estimated time that one more launch costs in a sequence of small kernels."""
NEW = re.compile(r"(^|\.)(empty|empty_like|new_empty)$")
"""Functions that create a tensor without values."""


@dataclass(frozen=True)
class OneLaunch:
    """A kernel that the file launches once, as a statement of a function's body."""

    facts: Facts
    launch: Launch
    statements: tuple[Node, ...]
    """The statements of the function."""
    position: int
    """The index of the launch among them."""

    @cached_property
    def passed(self) -> dict[str, Node]:
        """Parameters of the kernel to the arguments."""
        return self.launch.passed(self.facts.site.kernel)

    @property
    def before(self) -> tuple[Node, ...]:
        """The statements before the launch."""
        return self.statements[: self.position]

    @property
    def after(self) -> tuple[Node, ...]:
        """The statements after the launch."""
        return self.statements[self.position + 1 :]

    def is_shared(self, parameter: str) -> bool:
        """Whether the launch passes the tensor of a parameter, or a tensor made from it, a second time."""
        name = text_of(self.passed[parameter])
        return any(other != parameter and name in _values(node) for other, node in self.passed.items())


def one_launch(facts: Facts) -> OneLaunch | None:
    """The launch of a kernel that is launched once; None for other kernels."""
    site = facts.site
    if len(site.launches) != 1 or not facts.launches or is_called(facts) or is_splatted(site.launches[0]):
        return None
    launch = site.launches[0]
    body = field(launch.function, "body")
    statements = tuple(item for item in body.named_children if item.type != "comment") if body is not None else ()
    for position, statement in enumerate(statements):
        if statement.type == "expression_statement" and launch.call in statement.named_children:
            return OneLaunch(facts, launch, statements, position)
    return None


def occurrences(node: Node, name: str) -> list[Node]:
    """The places below a node that name a variable, keywords of calls left out."""
    return [item for item in walk(node) if item.type == "identifier" and text_of(item) == name and not is_label(item)]


def is_label(identifier: Node) -> bool:
    """Whether an identifier is a keyword of a call or an attribute."""
    parent = identifier.parent
    if parent is None:
        return False
    if parent.type == "keyword_argument":
        return field(parent, "name") == identifier
    return parent.type == "attribute" and field(parent, "attribute") == identifier


def is_description(identifier: Node) -> bool:
    """Whether the code reads only the shape and the like of a tensor: ``x.shape``, ``torch.empty_like(x)``."""
    parent = identifier.parent
    if parent is not None and parent.type == "attribute":
        return text_of(field(parent, "attribute")) in DESCRIPTIONS
    call = parent.parent if parent is not None and parent.type == "argument_list" else None
    return call is not None and NEW.search(text_of(field(call, "function"))) is not None


def is_created(value: Node) -> bool:
    """Whether an expression is a new tensor without values."""
    return value.type == "call" and NEW.search(text_of(field(value, "function"))) is not None


def assignment_in(statement: Node) -> tuple[Node, Node] | None:
    """The target and the value of a statement ``target = value``."""
    node = statement.named_children[0] if statement.type == "expression_statement" else None
    left, right = field(node, "left"), field(node, "right")
    return (left, right) if node is not None and node.type == "assignment" and left and right else None


def is_fresh(one: OneLaunch, tensor: str, creates: Callable[[Node], bool] = is_created) -> Node | None:
    """The call that creates a tensor, if it is new, only described until the launch, and passed to it once."""
    made: Node | None = None
    for statement in one.before:
        pair = assignment_in(statement)
        if pair is not None and text_of(pair[0]) == tensor:
            if made is not None or not creates(pair[1]) or occurrences(pair[1], tensor):
                return None
            made = pair[1]
        elif not all(map(is_description, occurrences(statement, tensor))):
            return None
    used = [item for item in occurrences(one.statements[one.position], tensor) if not is_description(item)]
    return made if len(used) == 1 else None


def only_accesses(facts: Facts, parameter: str, operation: str) -> list[Node] | None:
    """The loads or stores of a pointer's tensor; None if the kernel does anything else with the pointer."""
    site, calls = facts.site, list[Node]()
    for name, call in site.kernel.calls:
        if name in (*MEMORY, *ATOMICS):
            pointer = argument(call, 0, "pointer")
            bases = site.bases(pointer) if pointer is not None else []
            if not bases:
                # The pointer may come from any parameter.
                return None
            if parameter in bases:
                if bases != [parameter] or name != operation:
                    return None
                calls.append(call)
    values = site.kernel.values.items()
    derived = {parameter, *(name for name, each in values if any(parameter in site.bases(value) for value in each))}
    for call in (node for node in walk(site.kernel.body) if node.type == "call"):
        function = field(call, "function")
        if site.kernel.triton_name(function) or (function is not None and function.type == "attribute"):
            continue
        if any(text_of(item) in derived for item in walk(call) if item.type == "identifier"):
            return None
    return calls or None


def _values(node: Node) -> Iterator[str]:
    """Names of the tensors whose elements an argument may hold."""
    return (text_of(item) for item in walk(node) if item.type == "identifier" and not is_description(item))
