"""The tree-sitter parser for Python, and small walks over its trees."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

import tree_sitter_python
from tree_sitter import Language, Node, Parser

BOM = b"\xef\xbb\xbf"

# Where a top-level statement starts: at the margin, and with no word that goes on with the statement before.
_STARTS = re.compile(rb"^(?!(?:else|elif|except|finally)\b)[^\s#)\]}]", re.MULTILINE)


@lru_cache(maxsize=1)
def _parser() -> Parser:
    return Parser(Language(tree_sitter_python.language()))


def parse(text: bytes) -> Node:
    """The root of the syntax tree; broken files parse too, with error nodes."""
    return _parser().parse(text).root_node


def parse_apart(text: bytes) -> tuple[Node, tuple[Node, ...]]:
    """The tree of the statements that parse, and one tree for each top-level statement that does not.

    One forgotten bracket makes the parser read everything behind it wrongly. So in a broken file the broken statements
    are blanked out before the rest is parsed; offsets and lines are those of ``text`` in every tree.
    """
    root = parse(text)
    if not root.has_error:
        return root, ()
    broken = [(start, end) for start, end in statements_by_margin(text) if parse(text[start:end]).has_error]
    rest = text
    for start, end in broken:
        rest = rest[:start] + _blank(rest[start:end]) + rest[end:]
    return parse(rest), tuple(parse(_blank(text[:start]) + text[start:end]) for start, end in broken)


def statements_by_margin(text: bytes) -> list[tuple[int, int]]:
    """Byte ranges of top-level statements, by the margin alone; decorators go with what they decorate."""
    body = len(BOM) if text.startswith(BOM) else 0
    starts = [match.start() for match in _STARTS.finditer(text, body)]
    kept = [at for i, at in enumerate(starts) if i == 0 or text[starts[i - 1] : starts[i - 1] + 1] != b"@"]
    ends = [*kept[1:], len(text)]
    return list(zip(kept, ends[: len(kept)], strict=True))


def _blank(text: bytes) -> bytes:
    return re.sub(rb"[^\r\n]", b" ", text)


def walk(node: Node) -> Iterator[Node]:
    """``node`` and everything below it, in source order."""
    pending = [node]
    while pending:
        item = pending.pop()
        yield item
        pending.extend(reversed(item.children))


def text_of(node: Node | None) -> str:
    """The node's source; empty for no node."""
    return (node.text or b"").decode("utf-8", "replace") if node is not None else ""


def field(node: Node | None, name: str) -> Node | None:
    """A named child."""
    return node.child_by_field_name(name) if node is not None else None


def line_of(node: Node) -> int:
    """1-based first line."""
    return node.start_point[0] + 1


def line_start(text: bytes, offset: int) -> int:
    """Offset of the start of the line that ``offset`` is in; behind a byte order mark."""
    start = text.rfind(b"\n", 0, offset) + 1
    return len(BOM) if start == 0 and text.startswith(BOM) else start


def line_end(text: bytes, offset: int) -> int:
    """Offset behind the line, with its ending, that ``offset`` is in."""
    found = text.find(b"\n", offset)
    return len(text) if found < 0 else found + 1


def first_error(node: Node) -> Node | None:
    """The first error or missing node at or below ``node``."""
    if not node.has_error:
        return None
    return next((item for item in walk(node) if item.is_error or item.is_missing), None)


def undecorated(node: Node) -> Node:
    """The ``def`` or ``class`` under its decorators; any other node itself."""
    inner = field(node, "definition") if node.type == "decorated_definition" else None
    return node if inner is None else inner


def with_decorators(node: Node) -> Node:
    """The opposite of :func:`undecorated`."""
    parent = node.parent
    return parent if parent is not None and parent.type == "decorated_definition" else node


def holds_statements(node: Node) -> bool:
    """Whether statements may stand below the node, other than in a function or class; never below an expression."""
    if node.type in ("expression_statement", "return_statement"):
        return False
    return node.type in ("block", "with_clause", "ERROR") or node.type.endswith(("_statement", "_clause"))


def is_docstring(node: Node) -> bool:
    """Whether a statement is a plain string."""
    inner = node.named_children[0] if node.type == "expression_statement" and node.named_children else None
    if inner is None or len(node.named_children) > 1 or inner.type not in ("string", "concatenated_string"):
        return False
    return re.match(r"(?i)[rut]*[\"']", text_of(inner)) is not None


def comments_above(text: bytes, root: Node, node: Node) -> list[Node]:
    """The comments that stand on lines of their own and touch ``node`` from above, first to last."""
    own_line = {
        item.start_point[0]: item
        for item in walk(root)
        if item.type == "comment" and not text[line_start(text, item.start_byte) : item.start_byte].strip()
    }
    found: list[Node] = []
    row = node.start_point[0] - 1
    while row in own_line:
        found.append(own_line[row])
        row -= 1
    return found[::-1]
