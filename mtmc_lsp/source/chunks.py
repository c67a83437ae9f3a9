"""Split a file into chunks (a top-level statement with the comments directly above it), and update them after an edit.

Parsing a long file takes as long as several keystrokes. So after an edit only the statements around it are parsed. The result is
the same as for the whole file, provided that the code around the edit has no syntax error.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from tree_sitter import Node

from mtmc_lsp.source.syntax import parse, statements_by_margin


class Chunk(NamedTuple):
    """A top-level statement with the comments directly above it."""

    start: int
    """Byte offset in the file."""
    line: int
    """0-based line of its first byte."""
    text: bytes


class Change(NamedTuple):
    """An edit: bytes ``start`` to ``old_end`` of the old text became bytes ``start`` to ``new_end`` of the new text."""

    start: int
    old_end: int
    new_end: int

    def followed_by(self, later: Change) -> Change:
        """Combine this change with a later one, whose old text is the new text of this one."""
        extra = max(0, later.old_end - self.new_end)
        shift = later.new_end - later.old_end
        return Change(min(self.start, later.start), self.old_end + extra, max(self.new_end, later.old_end) + shift)


class Chunks(NamedTuple):
    """The chunks of one version of a file."""

    all: tuple[Chunk, ...]
    is_certain: bool = True
    """Whether parsing the whole file would give the same chunks. Not certain after parsing a syntax error without its context."""


def chunks_of(text: bytes, root: Node) -> Chunks:
    """Split a whole file with the syntax tree ``root``."""
    return Chunks(tuple(_split(text, root, 0, 0)), not root.has_error)


class SplicedChunks(NamedTuple):
    """Chunks after an edit."""

    chunks: Chunks
    removed: Sequence[Chunk]
    """The old chunks that were parsed again."""
    new: Sequence[Chunk]
    """The chunks that replace them."""


def splice(old: Chunks, text: bytes, change: Change) -> SplicedChunks | None:
    """Update the chunks after a change; ``None`` if the whole file must be parsed."""
    starts = [chunk.start for chunk in old.all]
    # Include one untouched neighbour on each side. If it comes out unchanged, the other chunks on that side are valid.
    first = max(0, bisect_right(starts, change.start) - 2)
    stop = bisect_left(starts, change.old_end + 1) + 2
    shift = change.new_end - change.old_end
    begin = starts[first] if first else 0
    end = starts[stop] + shift if stop < len(starts) else len(text)
    if not (_at_line_start(text, begin) and _at_line_start(text, end)):
        return None
    edited_text, removed = text[begin:end], old.all[first:stop]
    root = parse(edited_text)
    is_certain = old.is_certain and not root.has_error
    new = list(_split(edited_text, root, begin, removed[0].line if first else 0))
    unchanged = [(0, 0)] * (first > 0) + [(-1, shift)] * (stop < len(starts))
    if len(new) < len(unchanged) or not all(
        _is_unchanged(new[i], removed[i], by, compare_text=is_certain) for i, by in unchanged
    ):
        return None
    # All following chunks have the same bytes at another offset.
    following = old.all[stop:]
    lines = new[-1].line - removed[-1].line if following else 0
    shifted = [Chunk(start + shift, line + lines, text) for start, line, text in following]
    return SplicedChunks(Chunks((*old.all[:first], *new, *shifted), is_certain), removed, new)


def _is_unchanged(new: Chunk, old: Chunk, shift: int, *, compare_text: bool) -> bool:
    """Whether a chunk equals an old one. Next to a syntax error only the start is compared: the end depends on the context."""
    return new.start == old.start + shift and (not compare_text or new.text == old.text)


def _at_line_start(text: bytes, offset: int) -> bool:
    return offset in (0, len(text)) or text[offset - 1 : offset] == b"\n"


def _split(text: bytes, root: Node, start: int, line: int) -> Iterator[Chunk]:
    """Split a text that starts at the given offset and line of a file."""
    previous = 0
    for begin, end in _ranges(text, root):
        line += text.count(b"\n", previous, begin)
        previous = begin
        yield Chunk(start + begin, line, text[begin:end])


def _with_comments(text: bytes, start: int) -> int:
    """Start of the unindented comment lines directly above a line."""
    while start:
        comments = text.rfind(b"\n", 0, start - 1) + 1
        if not text.startswith(b"#", comments):
            break
        start = comments
    return start


def _ranges(text: bytes, root: Node) -> Iterator[tuple[int, int]]:
    """Byte ranges of the chunks."""
    if root.has_error:
        starts = [_with_comments(text, start) for start, _ in statements_by_margin(text)]
        # Exclude trailing empty lines, as for a statement without errors.
        yield from ((start, start + len(text[start:end].rstrip())) for start, end in pairwise([*starts, len(text)]))
        return
    comments: tuple[int, int] | None = None
    """Start offset and last row of the comments that precede the next statement."""
    for child in root.children:
        row = child.start_point[0]
        if child.type == "comment":
            touches = comments is not None and comments[1] + 1 == row
            comments = (comments[0], row) if touches and comments is not None else (child.start_byte, row)
            continue
        start = comments[0] if comments is not None and comments[1] + 1 == row else child.start_byte
        comments = None
        yield start, child.end_byte
