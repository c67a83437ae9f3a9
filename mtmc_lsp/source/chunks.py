"""A file cut into chunks, each a top-level statement with the comments that touch it from above, and cut anew around an edit.

Reading a long file as a whole takes as long as several keystrokes. So after an edit only the statements around it are read; what
is found is what the whole file would give, as long as nothing around the edit is broken.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from tree_sitter import Node

from mtmc_lsp.source.syntax import parse, statements_by_margin


class Chunk(NamedTuple):
    """A top-level statement with the comments above it."""

    start: int
    """Byte offset in the file."""
    line: int
    """0-based line of its first byte."""
    text: bytes


class Change(NamedTuple):
    """What was typed since: bytes ``start`` to ``old_end`` of the old text are ``start`` to ``new_end`` of the new one."""

    start: int
    old_end: int
    new_end: int

    def then(self, later: Change) -> Change:
        """This change and one after it, whose old text is this one's new text, as one."""
        more = max(0, later.old_end - self.new_end)
        moved = later.new_end - later.old_end
        return Change(min(self.start, later.start), self.old_end + more, max(self.new_end, later.old_end) + moved)


class Chunks(NamedTuple):
    """The chunks of one state of a file."""

    all: tuple[Chunk, ...]
    is_certain: bool = True
    """Whether reading the whole file would give them: not once something broken was read without what is around it."""


def chunks_of(text: bytes, root: Node) -> Chunks:
    """The chunks of a whole file, whose tree is ``root``."""
    return Chunks(tuple(_cut(text, root, 0, 0)), not root.has_error)


class Spliced(NamedTuple):
    """Chunks after an edit."""

    chunks: Chunks
    gone: Sequence[Chunk]
    """Those of the old ones that were read again, and those that are there instead."""
    new: Sequence[Chunk]


def spliced(old: Chunks, text: bytes, change: Change) -> Spliced | None:
    """The chunks of ``text``, from those before the change; ``None`` where only reading all of it can tell."""
    starts = [chunk.start for chunk in old.all]
    # With a neighbour on each side that was not touched: found again as it was, it shows where the new ones end.
    first = max(0, bisect_right(starts, change.start) - 2)
    stop = bisect_left(starts, change.old_end + 1) + 2
    moved = change.new_end - change.old_end
    begin = starts[first] if first else 0
    end = starts[stop] + moved if stop < len(starts) else len(text)
    if not (_at_margin(text, begin) and _at_margin(text, end)):
        return None
    part, gone = text[begin:end], old.all[first:stop]
    root = parse(part)
    is_certain = old.is_certain and not root.has_error
    new = list(_cut(part, root, begin, gone[0].line if first else 0))
    same = [(0, 0)] * (first > 0) + [(-1, moved)] * (stop < len(starts))
    if len(new) < len(same) or not all(_is_found(new[i], gone[i], by, alike=is_certain) for i, by in same):
        return None
    # The others are the same bytes at another place.
    rest = old.all[stop:]
    lines = new[-1].line - gone[-1].line if rest else 0
    shifted = [Chunk(start + moved, line + lines, own) for start, line, own in rest]
    return Spliced(Chunks((*old.all[:first], *new, *shifted), is_certain), gone, new)


def _is_found(new: Chunk, old: Chunk, moved: int, *, alike: bool) -> bool:
    """Whether a chunk is one of before; what is broken ends differently, alone, from how it ends before what is not."""
    return new.start == old.start + moved and (not alike or new.text == old.text)


def _at_margin(text: bytes, at: int) -> bool:
    return at in (0, len(text)) or text[at - 1 : at] == b"\n"


def _cut(text: bytes, root: Node, start: int, line: int) -> Iterator[Chunk]:
    """The chunks of a text that is at a place of a file."""
    at = 0
    for begin, end in _ranges(text, root):
        line += text.count(b"\n", at, begin)
        at = begin
        yield Chunk(start + begin, line, text[begin:end])


def _with_comments(text: bytes, start: int) -> int:
    """The start of the comment lines at the margin that touch a line from above."""
    while start:
        above = text.rfind(b"\n", 0, start - 1) + 1
        if not text.startswith(b"#", above):
            break
        start = above
    return start


def _ranges(text: bytes, root: Node) -> Iterator[tuple[int, int]]:
    """Byte ranges of the chunks."""
    if root.has_error:
        starts = [_with_comments(text, start) for start, _ in statements_by_margin(text)]
        # Without the empty lines behind, as a statement that is not broken.
        yield from ((start, start + len(text[start:end].rstrip())) for start, end in pairwise([*starts, len(text)]))
        return
    above: tuple[int, int] | None = None
    """Start and last row of the comments that wait for a statement."""
    for child in root.children:
        row = child.start_point[0]
        if child.type == "comment":
            touches = above is not None and above[1] + 1 == row
            above = (above[0], row) if touches and above is not None else (child.start_byte, row)
            continue
        start = above[0] if above is not None and above[1] + 1 == row else child.start_byte
        above = None
        yield start, child.end_byte
