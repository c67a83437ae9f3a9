"""The tree-sitter parser for Python, and small walks over its trees."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import tree_sitter_python
from tree_sitter import Language, Node, Parser


@lru_cache(maxsize=1)
def _parser() -> Parser:
    return Parser(Language(tree_sitter_python.language()))


def parse(text: bytes) -> Node:
    """The root of the syntax tree; broken files parse too, with error nodes."""
    return _parser().parse(text).root_node


def walk(node: Node) -> Iterator[Node]:
    """``node`` and everything below it, in source order."""
    yield node
    for child in node.children:
        yield from walk(child)


def text_of(node: Node) -> str:
    """The node's source."""
    return (node.text or b"").decode("utf-8", "replace")


def field(node: Node, name: str) -> Node | None:
    """A named child."""
    return node.child_by_field_name(name)


def line_of(node: Node) -> int:
    """1-based first line."""
    return node.start_point[0] + 1


def first_error(node: Node) -> Node | None:
    """The first error or missing node at or below ``node``."""
    return next((item for item in walk(node) if item.is_error or item.is_missing), None)
