"""Tiles of products: their numbers, and offsets that go through a modulo."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from tree_sitter import Node

from mtmc_lsp.kernels.actions.base import Facts
from mtmc_lsp.kernels.repairs.values import NEUTRAL
from mtmc_lsp.source.lint.kernel import names_in
from mtmc_lsp.source.syntax import field, text_of, walk

COUNTING = frozenset({"program_id", "num_programs", "cdiv", "minimum", "swizzle2d"})
"""Functions by which a program finds its tile."""


def is_product(facts: Facts) -> bool:
    """Whether a kernel multiplies tiles and reduces nothing else, so that elements beyond the result do not count."""
    names = [function for function, _ in facts.site.kernel.calls]
    return "dot" in names and not any(function in NEUTRAL for function in names)


def tile_numbers(facts: Facts) -> frozenset[str]:
    """Names of a product that depend on the program's number and on counts of blocks alone, as ``pid_m`` and ``pid_n``.

    Which program computes which tile follows from the counts, so any block size gives each tile one program.
    """
    kernel = facts.site.kernel
    if not is_product(facts):
        return frozenset()
    found = set()
    for name, values in kernel.values.items():
        calls = [node for source in kernel.sources(*values) for node in walk(source) if node.type == "call"]
        functions = {kernel.triton_name(field(call, "function")) or text_of(field(call, "function")) for call in calls}
        if "program_id" in functions and functions <= COUNTING | {"min"}:
            found.add(name)
    return frozenset(found)


def reached(facts: Facts, node: Node | None, stops: Collection[str]) -> Iterator[Node]:
    """The nodes of an expression and of the values of its names, but not of the values of some."""
    pending, seen = [node] if node is not None else [], set(stops)
    while pending:
        expression = pending.pop()
        yield from walk(expression)
        for name in set(names_in(expression)) - seen:
            seen.add(name)
            pending += facts.site.kernel.values.get(name, ())


def is_wrapped(facts: Facts, pointer: Node | None, name: str) -> bool:
    """Whether the offsets of a block go through a modulo, as ``(pid * BLOCK + tl.arange(0, BLOCK)) % M`` in products.

    Lanes beyond the length then read elements of its begin, and the mask of the store leaves them out.
    """
    kernel = facts.site.kernel
    calls = [node for node in reached(facts, pointer, ()) if node.type == "call"]
    blocks = [c for c in calls if kernel.triton_name(field(c, "function")) == "arange" and name in text_of(c)]
    return is_product(facts) and all(any(_is_modulo(node) for node in _around(call)) for call in blocks)


def unwrapped(value: Node) -> Node:
    """The offsets inside a modulo; other expressions as they are."""
    left = field(value, "left") if _is_modulo(value) else None
    return left.named_children[0] if left is not None and left.type == "parenthesized_expression" else left or value


def _is_modulo(node: Node) -> bool:
    return node.type == "binary_operator" and text_of(field(node, "operator")) == "%"


def _around(node: Node) -> Iterator[Node]:
    """The arithmetic around a node."""
    parent = node.parent
    while parent is not None and parent.type in ("binary_operator", "parenthesized_expression"):
        yield parent
        parent = parent.parent
