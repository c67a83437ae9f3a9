"""Generated blocks in a file: the lines between ``# mtmc: begin NAME`` and ``# mtmc: end NAME``.

A block begins with its imports, unless they are at the top of the file. Two empty lines separate it from the code below it, or,
at the end of a file, from the code above it. A file without a final newline stays without one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

BEGIN, END = "# mtmc: begin", "# mtmc: end"
IMPORT = "# mtmc: import"
"""Mark of an import at the top of the file that blocks below the imports share."""
LATE_IMPORT = "  # noqa: E402"
"""Comment on imports inside a block: linters expect imports at the top of the file."""
BLANK = rb"(?:[ \t]*(?:\r\n|\n))"
LINE_START = rb"(?:^|(?<=\xef\xbb\xbf))"
"""Start of a line, or the position after a byte order mark."""
N_BLANK = 2
"""Number of empty lines between a block and other code."""
_LAST_LINE = rb"(?:[ \t]*(?:\r\n|\n|\Z))"
_ANY_BLOCK = re.compile(
    LINE_START + re.escape(BEGIN.encode()) + rb" (\S+)" + BLANK + rb"(?:.*\n)*?" + END.encode() + rb" \1" + _LAST_LINE,
    re.MULTILINE,
)
_MARKED_IMPORT = re.compile(LINE_START + rb"(?:import|from) .*?" + IMPORT.encode() + rb"[ \t]*\r?$", re.MULTILINE)
_OWN_IMPORTS = re.compile(r"(?:(?:import|from) .*\n)+\n*")


@dataclass(frozen=True)
class Span:
    """The bytes of a block, from its first mark to the end of the line of its last."""

    start: int
    end: int


def newline_of(text: bytes) -> bytes:
    """The line ending of a file."""
    first = text.find(b"\n")
    return b"\r\n" if first > 0 and text[first - 1 : first] == b"\r" else b"\n"


def find_block(text: bytes, qualname: str) -> Span | None:
    """The generated block of a target."""
    begin, end = (f"{mark} {qualname}".encode() for mark in (BEGIN, END))
    start = text.find(begin)
    if start < 0:
        return None
    pattern = LINE_START + re.escape(begin) + BLANK + rb"(?:.*\n)*?" + re.escape(end) + _LAST_LINE
    match = re.compile(pattern, re.MULTILINE).search(text, start)
    return Span(match.start(), match.end()) if match is not None else None


def block_code(text: bytes, qualname: str) -> str | None:
    """The code inside a target's block, without marks and the block's own imports; None if there is no block."""
    span = find_block(text, qualname)
    if span is None:
        return None
    lines = text[span.start : span.end].decode("utf-8", "surrogatepass").replace("\r\n", "\n").rstrip("\n").split("\n")
    code = "".join(f"{line}\n" for line in lines[1:-1])
    imports = _OWN_IMPORTS.match(code)
    return code[imports.end() :] if imports is not None else code


def framed(qualname: str, imports: Sequence[str], code: str, newline: bytes) -> bytes:
    """The lines of a block, without the empty lines around it."""
    lines = [f"{BEGIN} {qualname}", *(f"{statement}{LATE_IMPORT}" for statement in imports)]
    lines += [""] * (N_BLANK if imports else 0)
    lines += [*code.rstrip("\n").split("\n"), f"{END} {qualname}", ""]
    return newline.join(line.encode() for line in lines)


def with_gap(text: bytes, offset: int, block: bytes, newline: bytes) -> bytes:
    """A block with the empty lines that separate it where it is inserted: at the start of a line or the end of the file."""
    gap = newline * N_BLANK
    if offset < len(text):
        return block + gap
    return gap + block if text.endswith(b"\n") else newline + gap + block.removesuffix(newline)


def remove_block(text: bytes, span: Span) -> bytes:
    """Remove a block and the empty lines that separate it; empty lines that the user removed are not missed."""
    before, after = text[: span.start], text[span.end :]
    if after.strip():
        gap = re.match(BLANK + rb"{0,%d}" % N_BLANK, after)
        return before + after[gap.end() if gap is not None else 0 :]
    for _ in range(N_BLANK):
        before = re.sub(rb"(?<=\n)[ \t]*(?:\r\n|\n)\Z", b"", before)
    return before + after if text.endswith(b"\n") or after else re.sub(rb"\r?\n\Z", b"", before)


def without_blocks(text: bytes, *, marked_imports: bool) -> bytes:
    """``text`` with spaces in place of generated blocks; all other bytes keep their offsets.

    Args:
        marked_imports: whether imports at the top of the file that were added for blocks are replaced too.
    """
    text = _ANY_BLOCK.sub(_spaces, text)
    return _MARKED_IMPORT.sub(_spaces, text) if marked_imports else text


def _spaces(match: re.Match[bytes]) -> bytes:
    return re.sub(rb"[^\r\n]", b" ", match[0])
