"""An open document: the client's text byte for byte, positions in the client's units, and an incremental syntax tree.

pygls keeps documents too, but cuts lines where ``str.splitlines`` does (at form feeds, say), which editors do not.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from functools import lru_cache, reduce

import tree_sitter_python
from lsprotocol import types as lsp
from tree_sitter import Language, Node, Parser, Tree

from mtmc_lsp.source.chunks import Change

NEWLINE = re.compile(rb"\r\n|\n|\r")
# Clients may send half of a surrogate pair; it must come back as it was.
ERRORS = "surrogatepass"


@lru_cache(maxsize=1)
def _parser() -> Parser:
    return Parser(Language(tree_sitter_python.language()))


class Text:
    """The text of a document."""

    def __init__(self, text: str, encoding: str) -> None:
        """Take the text as opened; ``encoding`` is that of positions: ``utf-8``, ``utf-16`` or ``utf-32``."""
        self._encoding = encoding
        self.data = text.encode("utf-8", ERRORS)
        self._starts: list[int] | None = None
        self._tree: Tree | None = None
        self._is_parsed = False
        self._changes: list[Change] | None = None
        """Since they were last taken; nothing is known of what was before a text that came as a whole."""

    def __str__(self) -> str:
        return self.data.decode("utf-8", ERRORS)

    # Changes -----------------------------------------------------------------------------------------------------

    def replace_all(self, text: str) -> None:
        """The client sent everything anew."""
        self.data = text.encode("utf-8", ERRORS)
        self._starts = self._tree = None
        self._is_parsed = False
        self._changes = None

    def replace(self, range_: lsp.Range, text: str) -> None:
        """The client changed a range."""
        start = self.offset(range_.start)
        end = max(start, self.offset(range_.end))
        new = text.encode("utf-8", ERRORS)
        before, old_end = self._point(start), self._point(end)
        self.data = self.data[:start] + new + self.data[end:]
        self._starts = self._moved_starts(start, end, len(new) - (end - start))
        self._is_parsed = False
        if self._changes is not None:
            self._changes.append(Change(start, end, start + len(new)))
        if self._tree is not None:
            self._tree.edit(start, end, start + len(new), before, old_end, self._point(start + len(new)))

    def take_change(self) -> Change | None:
        """What changed since this was last asked; ``None`` where there is nothing of what was, or where nothing changed."""
        changes, self._changes = self._changes, []
        return reduce(Change.followed_by, changes) if changes else None

    @property
    def root(self) -> Node:
        """The root of the syntax tree; only what changed is parsed again."""
        if self._tree is None or not self._is_parsed:
            self._tree = (
                _parser().parse(self.data, self._tree) if self._tree is not None else _parser().parse(self.data)
            )
            self._is_parsed = True
        return self._tree.root_node

    def _point(self, offset: int) -> tuple[int, int]:
        # tree-sitter's rows end at line feeds alone.
        start = self.data.rfind(b"\n", 0, offset) + 1
        return self.data.count(b"\n", 0, start), offset - start

    # Positions ---------------------------------------------------------------------------------------------------

    def _lines(self) -> list[int]:
        """Offsets of the starts of the lines."""
        if self._starts is None:
            self._starts = [0, *(match.end() for match in NEWLINE.finditer(self.data))]
        return self._starts

    def _moved_starts(self, start: int, end: int, by: int) -> list[int] | None:
        """The lines after a change of the old offsets ``start`` to ``end``; only those around it are looked for anew."""
        old = self._starts
        if old is None:
            return None
        # One line more on each side: a line ending may have been cut in two, or made of two.
        first = max(0, bisect_right(old, start) - 2)
        behind = bisect_right(old, end) + 1
        stop = old[behind] + by if behind < len(old) else len(self.data)
        between = [match.end() for match in NEWLINE.finditer(self.data, old[first], stop)]
        return [*old[: first + 1], *between, *(at + by for at in old[behind + 1 :])]

    @property
    def line_count(self) -> int:
        """Number of lines; an empty text has one."""
        return len(self._lines())

    def line(self, number: int) -> bytes:
        """A 0-based line without its ending; empty outside the text."""
        starts = self._lines()
        if not 0 <= number < len(starts):
            return b""
        end = starts[number + 1] if number + 1 < len(starts) else len(self.data)
        return self.data[starts[number] : end].rstrip(b"\r\n")

    def offset(self, position: lsp.Position) -> int:
        """Byte offset of a position; beyond the end of a line it is that end, beyond the last line that of the text."""
        starts = self._lines()
        if position.line >= len(starts):
            return len(self.data)
        line = self.line(position.line)
        start = starts[position.line]
        if line.isascii() or self._encoding == "utf-8":
            return start + min(position.character, len(line))
        units = 0
        for index, character in enumerate(text := line.decode("utf-8", ERRORS)):
            if units >= position.character:
                return start + len(text[:index].encode("utf-8", ERRORS))
            units += 2 if self._encoding == "utf-16" and ord(character) > 0xFFFF else 1
        return start + len(line)

    def position(self, offset: int) -> lsp.Position:
        """The position of a byte offset."""
        starts = self._lines()
        row = bisect_right(starts, offset) - 1
        return lsp.Position(row, self._units(self.data[starts[row] : offset]))

    def range(self, start: int, end: int) -> lsp.Range:
        """The range between two byte offsets."""
        return lsp.Range(self.position(start), self.position(end))

    def line_range(self, number: int) -> lsp.Range:
        """The words of a 0-based line."""
        line = self.line(number)
        indent = len(line) - len(line.lstrip())
        return lsp.Range(lsp.Position(number, indent), lsp.Position(number, self._units(line)))

    def _units(self, part: bytes) -> int:
        if part.isascii() or self._encoding == "utf-8":
            return len(part)
        text = part.decode("utf-8", ERRORS)
        if self._encoding == "utf-32":
            return len(text)
        return len(text) + sum(ord(character) > 0xFFFF for character in text)
