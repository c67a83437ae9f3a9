"""The tree-sitter parser for Python, and helpers for its syntax trees."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

import tree_sitter_python
from tree_sitter import Language, Node, Parser, Point, Range, Tree

BOM = b"\xef\xbb\xbf"

MAX_DEPTH = 1000
"""Maximum depth of a syntax tree that is analysed. Python itself accepts 100 nested blocks and 200 nested brackets."""
MAX_COMMENTS = 100
"""Maximum number of consecutive comments that the parser gets."""
_LONE_CR = re.compile(rb"\r(?!\n)")
_STRING_OR_COMMENT = re.compile(
    rb'''"""(?:[^"\\]+|\\.|"(?!""))*(?:""")?|\'{3}(?:[^\'\\]+|\\.|\'(?!\'\'))*(?:\'{3})?'''
    rb"""|"(?:[^"\\\n]+|\\.)*"?|\'(?:[^\'\\\n]+|\\.)*\'?|\#[^\n]*""",
    re.DOTALL,
)

_NAMED_LINE = re.compile(r"\bline (\d+)")
NEWER_NODES = {"type_alias_statement", "type_parameter"}
NEWER_MESSAGES = ("f-string", "multiple exception types must be parenthesized")
"""Syntax of later Python versions, which the user's interpreter may accept although this one does not."""

# Start of a top-level statement: not indented, and not a keyword that continues the previous statement.
_STARTS = re.compile(rb"^(?!(?:else|elif|except|finally)\b)[^\s#)\]}]", re.MULTILINE)


@lru_cache(maxsize=1)
def _parser() -> Parser:
    return Parser(Language(tree_sitter_python.language()))


def parse(text: bytes) -> Node:
    """Root of the syntax tree. Files with syntax errors are parsed too, with error nodes."""
    return parse_tree(parsable(text)).root_node


def parse_tree(text: bytes, old: Tree | None = None) -> Tree:
    """The syntax tree of a text for which ``parsable`` changes nothing, or of its result.

    Args:
        old: the edited tree of an earlier text, whose unchanged parts are reused.
    """
    return _parser().parse(text, old) if old is not None else _parser().parse(text)


def parsable(text: bytes) -> bytes:
    """A text of the same length and structure that the parser reads correctly and in linear time; mostly the text itself.

    At each comment, tree-sitter reads all comments that follow. So long runs of comments are shortened: their middle has no
    nodes.
    """
    text = with_line_feeds(text)
    if text.count(b"#") <= MAX_COMMENTS:
        return text
    runs: list[list[re.Match[bytes]]] = []
    for match in _STRING_OR_COMMENT.finditer(text):
        if match[0].startswith(b"#"):
            is_next = bool(runs) and not text[runs[-1][-1].end() : match.start()].strip()
            runs[-1].append(match) if is_next else runs.append([match])
    masked: bytearray | None = None
    for run in (run for run in runs if len(run) > MAX_COMMENTS):
        masked = masked or bytearray(text)
        start, end = run[MAX_COMMENTS // 2].start(), run[-MAX_COMMENTS // 2].start()
        masked[start:end] = _blank(text[start:end])
    return bytes(masked) if masked is not None else text


def with_line_feeds(text: bytes) -> bytes:
    """The text with line feeds in place of single carriage returns, which end lines for Python but not for tree-sitter."""
    return _LONE_CR.sub(b"\n", text) if b"\r" in text else text


def is_too_deep(root: Node) -> bool:
    """Whether a syntax tree is nested too deeply to be analysed."""
    cursor, depth = root.walk(), 0
    while True:
        if cursor.goto_first_child():
            depth += 1
            if depth > MAX_DEPTH:
                return True
            continue
        while not cursor.goto_next_sibling():
            if not cursor.goto_parent():
                return False
            depth -= 1


def parse_with_recovery(text: bytes) -> tuple[Node, tuple[Node, ...]]:
    """Syntax tree of the statements without errors, and one tree for each top-level statement with an error.

    One missing bracket makes the parser misread everything after it. So the broken statements are replaced by spaces before the
    rest is parsed. Offsets and lines in all trees are those of ``text``.
    """
    root = parse(text)
    if not root.has_error:
        return root, ()
    broken = [(start, end) for start, end in statements_by_margin(text) if parse(text[start:end]).has_error]
    masked = bytearray(text)
    for start, end in broken:
        masked[start:end] = _blank(text[start:end])
    return parse(bytes(masked)), tuple(_parse_ranges(text, broken))


def _parse_ranges(text: bytes, ranges: Iterable[tuple[int, int]]) -> Iterator[Node]:
    """The syntax tree of each range that starts at a line start, with the offsets and lines of the whole text."""
    text, row, counted = parsable(text), 0, 0
    for start, end in ranges:
        row += text.count(b"\n", counted, start)
        counted = start
        last = text.rfind(b"\n", start, end) + 1
        point = Point(row + text.count(b"\n", start, end), end - (last or start))
        parser = Parser(_parser().language, included_ranges=[Range(Point(row, 0), point, start, end)])
        yield parser.parse(text).root_node


def statements_by_margin(text: bytes) -> list[tuple[int, int]]:
    """Byte ranges of top-level statements, determined only by indentation; decorators belong to their definition."""
    body = len(BOM) if text.startswith(BOM) else 0
    starts = [match.start() for match in _STARTS.finditer(text, body)]
    statement_starts = [
        start for i, start in enumerate(starts) if i == 0 or text[starts[i - 1] : starts[i - 1] + 1] != b"@"
    ]
    ends = [*statement_starts[1:], len(text)]
    return list(zip(statement_starts, ends[: len(statement_starts)], strict=True))


def _blank(text: bytes) -> bytes:
    return re.sub(rb"[^\r\n]", b" ", text)


def walk(node: Node) -> Iterator[Node]:
    """``node`` and all its descendants, in source order."""
    pending = [node]
    while pending:
        item = pending.pop()
        yield item
        pending.extend(reversed(item.children))


def text_of(node: Node | None) -> str:
    """Source text of the node; empty for ``None``."""
    return (node.text or b"").decode("utf-8", "replace") if node is not None else ""


def field(node: Node | None, name: str) -> Node | None:
    """The child of a named field."""
    return node.child_by_field_name(name) if node is not None else None


def line_of(node: Node) -> int:
    """1-based first line of the node."""
    return node.start_point[0] + 1


def line_start(text: bytes, offset: int) -> int:
    """Offset of the start of the line that contains ``offset``, after a byte order mark."""
    start = text.rfind(b"\n", 0, offset) + 1
    return len(BOM) if start == 0 and text.startswith(BOM) else start


def line_end(text: bytes, offset: int) -> int:
    """Offset after the line that contains ``offset``, including its line ending."""
    newline = text.find(b"\n", offset)
    return len(text) if newline < 0 else newline + 1


def first_error(node: Node) -> Node | None:
    """The first error or missing node in ``node``."""
    if not node.has_error:
        return None
    return next((item for item in walk(node) if item.is_error or item.is_missing), None)


class PythonError(NamedTuple):
    """A syntax error in Python's words."""

    line: int
    """1-based."""
    message: str

    def moved(self, lines: int) -> PythonError:
        """The same error in a text with more lines above it. Messages name lines too."""
        message = _NAMED_LINE.sub(lambda match: f"line {int(match[1]) + lines}", self.message)
        return PythonError(self.line + lines, message)


def python_error(text: bytes) -> PythonError | None:
    """The first syntax error that Python reports for a text. None for syntax that only later versions of Python accept."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(text)
        return None
    except SyntaxError as error:
        line, message = error.lineno or 0, error.msg
    except (ValueError, RecursionError, MemoryError):
        return None
    root = parse(text)
    is_newer = message.startswith(NEWER_MESSAGES) or any(node.type in NEWER_NODES for node in walk(root))
    return None if not line or (is_newer and not root.has_error) else PythonError(line, message)


def undecorated(node: Node) -> Node:
    """The ``def`` or ``class`` inside a decorated definition; other nodes are returned unchanged."""
    inner = field(node, "definition") if node.type == "decorated_definition" else None
    return node if inner is None else inner


def with_decorators(node: Node) -> Node:
    """The decorated definition around a ``def`` or ``class``; inverse of :func:`undecorated`."""
    parent = node.parent
    return parent if parent is not None and parent.type == "decorated_definition" else node


def holds_statements(node: Node) -> bool:
    """Whether the node may contain statements, other than as a function or class. Never true for an expression."""
    if node.type in ("expression_statement", "return_statement"):
        return False
    return node.type in ("block", "with_clause", "ERROR") or node.type.endswith(("_statement", "_clause"))


def is_docstring(node: Node) -> bool:
    """Whether a statement is only a string literal."""
    inner = node.named_children[0] if node.type == "expression_statement" and node.named_children else None
    if inner is None or len(node.named_children) > 1 or inner.type not in ("string", "concatenated_string"):
        return False
    return re.match(r"(?i)[rut]*[\"']", text_of(inner)) is not None


def comments_above(text: bytes, root: Node, node: Node) -> list[Node]:
    """The comment-only lines directly above ``node``, first to last."""
    comment_lines = {
        item.start_point[0]: item
        for item in walk(root)
        if item.type == "comment" and not text[line_start(text, item.start_byte) : item.start_byte].strip()
    }
    comments: list[Node] = []
    row = node.start_point[0] - 1
    while row in comment_lines:
        comments.append(comment_lines[row])
        row -= 1
    return comments[::-1]
