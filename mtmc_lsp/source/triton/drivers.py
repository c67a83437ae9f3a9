"""Functions of a file that call its kernels with example inputs: tests, benchmarks and main functions without parameters."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from tree_sitter import Node

from mtmc_lsp.core.workload import Target, TargetKind
from mtmc_lsp.source.syntax import field, parse, text_of, undecorated, walk
from mtmc_lsp.source.targets import find_targets

USUAL = (re.compile(r"test"), re.compile(r"main|run|demo|example|check"), re.compile(r"bench|perf"))
"""Names of drivers, the most suitable first."""
DEFINITIONS = ("function_definition", "class_definition")


def find_driver(text: bytes, path: str, names: Collection[str]) -> Target | None:
    """The function without parameters that calls one of the named kernels or launchers, directly or through others."""
    root = parse(text)
    reaching = reaching_names(root, names)
    candidates = [
        target
        for target in find_targets(text, path)
        if target.kind is TargetKind.FUNCTION and target.qualname in reaching
    ]
    free = {text_of(field(node, "name")) for node in _functions(root) if not _required(node)}
    candidates = [target for target in candidates if target.qualname in free]
    return min(candidates, key=lambda target: (_rank(target.qualname), target.start_line), default=None)


def reaching_names(root: Node, names: Collection[str]) -> set[str]:
    """The named functions, and all definitions of the file whose text mentions them directly or indirectly."""
    mentions = {
        text_of(field(node, "name")): {text_of(item) for item in walk(node) if item.type == "identifier"}
        for node in map(undecorated, root.named_children)
        if node.type in DEFINITIONS
    }
    for node in root.named_children:
        # `attention = _Attention.apply`
        assignment = node.named_children[0] if node.type == "expression_statement" and node.named_children else None
        if assignment is not None and assignment.type == "assignment":
            mentions.setdefault(text_of(field(assignment, "left")), set()).update(
                text_of(item) for item in walk(assignment) if item.type == "identifier"
            )
    reached, pending = set(names), [*names]
    while pending:
        name = pending.pop()
        further = {owner for owner, used in mentions.items() if name in used and owner not in reached}
        reached |= further
        pending += further
    return reached


def without_driver_calls(text: bytes, names: Collection[str]) -> bytes:
    """The text without the top-level statements that call a kernel; lines keep their numbers.

    Without them, importing the file costs no run of its kernels.
    """
    root = parse(text)
    reaching = reaching_names(root, names)
    for node in reversed(root.named_children):
        if node.type == "expression_statement" and _calls(node, reaching):
            assignment = node.named_children[0]
            left = field(assignment, "left") if assignment.type == "assignment" else None
            new = f"{text_of(left)} = None" if left is not None and left.type == "identifier" else "pass"
            blank = new.encode() + b"\n" * text.count(b"\n", node.start_byte, node.end_byte)
            text = text[: node.start_byte] + blank + text[node.end_byte :]
    return text


def _calls(statement: Node, names: Collection[str]) -> bool:
    return any(node.type == "call" and text_of(field(node, "function")) in names for node in walk(statement))


def _functions(root: Node) -> Iterator[Node]:
    return (node for node in map(undecorated, root.named_children) if node.type == "function_definition")


def _required(function: Node) -> bool:
    """Whether a function has a parameter without a default."""
    parameters = field(function, "parameters")
    optional = ("default_parameter", "typed_default_parameter", "list_splat_pattern", "dictionary_splat_pattern")
    return any(item.type not in (*optional, "comment") for item in (parameters.named_children if parameters else ()))


def _rank(name: str) -> int:
    return next((rank for rank, pattern in enumerate(USUAL) if pattern.search(name)), len(USUAL))
