"""Open documents: exact bytes, positions in the client's encoding, an incremental syntax tree, and what is found in the text.

pygls has documents too, but splits lines like ``str.splitlines`` (for example at form feeds), unlike editors.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from bisect import bisect_right
from functools import reduce
from pathlib import Path

from lsprotocol import types as lsp
from pygls.uris import to_fs_path
from tree_sitter import Node, Tree

from mtmc_lsp.core.workload import TargetKind
from mtmc_lsp.source.blocks import BEGIN, END
from mtmc_lsp.source.chunks import Change, Chunk
from mtmc_lsp.source.lint import Context, Finding, check, context_of, is_checked
from mtmc_lsp.source.outline import LAUNCH, Outline, OutlineEntry, Outliner
from mtmc_lsp.source.syntax import (
    MAX_DEPTH,
    PythonError,
    line_start,
    parsable,
    parse_tree,
    python_error,
    with_line_feeds,
)

NEWLINE = re.compile(rb"\r\n|\n|\r")
MAX_ANALYSED_BYTES = 500_000
"""Maximum size of a file that is analysed, some 11,000 lines; the first analysis of the worst takes about a second."""
MAX_CHECKED_BYTES = 150_000
"""Total size of the statements of a file that the static checks read: kernels, launchers and ``forward`` methods."""
# Clients may send unpaired surrogates; they must be preserved.
ERRORS = "surrogatepass"
CONTINUATION = 0x80
"""The first two bits of the bytes of a UTF-8 character after its first byte."""


def path_of(uri: str) -> str:
    """The file of a URI; empty if it names none."""
    try:
        path = to_fs_path(uri) or ""
    except ValueError:
        return ""
    return "" if "\0" in path else path


class Text:
    """The text of a document."""

    def __init__(self, text: str, encoding: str) -> None:
        """Store the opened text. ``encoding`` is the position encoding: ``utf-8``, ``utf-16`` or ``utf-32``."""
        self.encoding = encoding
        self.data = text.encode("utf-8", ERRORS)
        self._starts: list[int] | None = None
        self._tree: Tree | None = None
        self._is_parsed = False
        self._is_exact = True
        """Whether the tree is that of the text itself, so that it can be updated."""
        self._source: tuple[bytes, bytes] | None = None
        """The text and the result of ``source``."""
        self._changes: list[Change] | None = None
        """Changes since the last ``take_change``; None after the whole text was replaced."""

    def __str__(self) -> str:
        return self.data.decode("utf-8", ERRORS)

    # Changes -----------------------------------------------------------------------------------------------------

    def replace_all(self, text: str) -> None:
        """Replace the whole text."""
        self.data = text.encode("utf-8", ERRORS)
        self._starts = self._tree = None
        self._is_parsed = False
        self._changes = None

    def replace(self, range_: lsp.Range, text: str) -> None:
        """Replace a range. A range whose end is before its start is turned around, as editors do."""
        start, end = sorted((self.offset(range_.start), self.offset(range_.end)))
        new = text.encode("utf-8", ERRORS)
        start_point, old_end_point = self._point(start), self._point(end)
        self.data = self.data[:start] + new + self.data[end:]
        self._starts = self._moved_starts(start, end, len(new) - (end - start))
        self._is_parsed = False
        if self._changes is not None:
            self._changes.append(Change(start, end, start + len(new)))
        if not self._is_exact:
            self._tree = None
        elif self._tree is not None:
            self._tree.edit(start, end, start + len(new), start_point, old_end_point, self._point(start + len(new)))

    def take_change(self) -> Change | None:
        """The combined change since the last call; ``None`` if nothing changed, or if the whole text was replaced."""
        changes, self._changes = self._changes, []
        return reduce(Change.followed_by, changes) if changes else None

    @property
    def source(self) -> bytes:
        """The text as Python reads it: with line feeds in place of single carriage returns, at the same offsets."""
        if self._source is None or self._source[0] is not self.data:
            self._source = (self.data, with_line_feeds(self.data))
        return self._source[1]

    @property
    def root(self) -> Node:
        """The root of the syntax tree, reparsed incrementally."""
        if self._tree is None or not self._is_parsed:
            text = parsable(self.data)
            self._is_exact = text is self.data
            self._tree = parse_tree(text, self._tree if self._is_exact else None)
            self._is_parsed = True
        return self._tree.root_node

    def _point(self, offset: int) -> tuple[int, int]:
        # tree-sitter ends rows only at line feeds.
        start = self.data.rfind(b"\n", 0, offset) + 1
        return self.data.count(b"\n", 0, start), offset - start

    # Positions ---------------------------------------------------------------------------------------------------

    def _lines(self) -> list[int]:
        """Byte offsets of line starts."""
        if self._starts is None:
            self._starts = [0, *(match.end() for match in NEWLINE.finditer(self.data))]
        return self._starts

    def _moved_starts(self, start: int, end: int, shift: int) -> list[int] | None:
        """Line starts after a change of the old range ``start`` to ``end``, which shifts later text by ``shift`` bytes."""
        old_starts = self._starts
        if old_starts is None:
            return None
        # Include one more line on each side: the change may have split or joined a \r\n line ending.
        first = max(0, bisect_right(old_starts, start) - 2)
        next_line = bisect_right(old_starts, end) + 1
        stop = old_starts[next_line] + shift if next_line < len(old_starts) else len(self.data)
        new_starts = [match.end() for match in NEWLINE.finditer(self.data, old_starts[first], stop)]
        return [
            *old_starts[: first + 1],
            *new_starts,
            *(line_start + shift for line_start in old_starts[next_line + 1 :]),
        ]

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
        """Byte offset of a position, clamped to the end of its line and of the text.

        A position inside a character is that of the character: no edit may split the bytes of one.
        """
        starts = self._lines()
        if position.line >= len(starts):
            return len(self.data)
        line = self.line(position.line)
        start = starts[position.line]
        if line.isascii() or self.encoding == "utf-8":
            column = min(position.character, len(line))
            while column < len(line) and line[column] & 0xC0 == CONTINUATION:
                column -= 1
            return start + column
        units = 0
        for index, character in enumerate(text := line.decode("utf-8", ERRORS)):
            units += 2 if self.encoding == "utf-16" and ord(character) > 0xFFFF else 1
            if units > position.character:
                return start + len(text[:index].encode("utf-8", ERRORS))
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
        """The range of a 0-based line without indentation."""
        line = self.line(number)
        indent = len(line) - len(line.lstrip())
        return lsp.Range(lsp.Position(number, indent), lsp.Position(number, self._units(line)))

    def _units(self, part: bytes) -> int:
        if part.isascii() or self.encoding == "utf-8":
            return len(part)
        text = part.decode("utf-8", ERRORS)
        if self.encoding == "utf-32":
            return len(text)
        return len(text) + sum(ord(character) > 0xFFFF for character in text)


class Document:
    """An open document."""

    def __init__(self, uri: str, language: str, version: int, text: Text) -> None:
        self.uri = uri
        self.path = path_of(uri)
        self.version = version
        self.text = text
        # Ignore notebook cells and other languages.
        self.is_python = language == "python" and uri.startswith("file:")
        self._outliner = Outliner(self.path)
        self._outline: Outline | None = None
        self._context: Context | None = None
        self._findings_by_chunk: dict[bytes, tuple[Finding, ...]] = {}
        self._errors_by_chunk: dict[bytes, PythonError | None] = {}
        """Syntax errors of the statements, as of the last pause in typing."""
        self.settle_timer: asyncio.TimerHandle | None = None
        """Timer that waits until the user stops typing."""
        self.pushed_at = 0.0
        """When diagnostics were last pushed, in event loop time."""
        self.pushed: tuple[int, list[lsp.Diagnostic]] | None = None
        """Document version and diagnostics of the last push."""
        self.on_save: tuple[bytes, tuple[Finding, ...]] = (b"", ())
        """Findings of the compile check on save, with the text they belong to; offsets are relative to the file."""

    @property
    def outline(self) -> Outline:
        """The outline of the current text."""
        source = self.text.source
        if self._outline is None or self._outline.text is not source:
            change = self.text.take_change()
            if self.is_too_long:
                self._outline = self._outliner.empty(source)
                return self._outline
            updated = self._outliner.edited(source, change) if change is not None else None
            self._outline = updated or self._outliner.outline(source, self.text.root)
        return self._outline

    @property
    def is_too_long(self) -> bool:
        """Whether the file is longer than what is analysed."""
        return len(self.text.data) > MAX_ANALYSED_BYTES

    @property
    def uses_tensors(self) -> bool:
        """Whether the file belongs to the user and uses torch or triton."""
        if {"site-packages", "dist-packages"} & set(Path(self.path).parts):
            return False
        packages = {path.split(".")[0] for path in self.outline.names.imports.values()}
        return bool(packages & {"torch", "triton", "jaxtyping"}) or b"# mtmc:" in self.text.data

    @property
    def not_analysed(self) -> list[tuple[int, int, str]]:
        """Byte ranges that are beyond what is analysed, with the reason."""
        if self.is_too_long:
            sizes = f"{len(self.text.data) / 1e3:.0f} kB, and mtmc analyses files of up to {MAX_ANALYSED_BYTES / 1e3:.0f} kB"
            return [(0, 0, f"this file has {sizes}; move the functions to optimise to a shorter file")]
        reason = f"this statement is not analysed, because it is nested more than {MAX_DEPTH} levels deep; split it"
        notes = [(chunk.start, chunk.start + len(chunk.text), reason) for chunk in self.outline.too_deep]
        for chunk in self._checked_chunks[1][:1]:
            reason = f"the static checks end here, after {MAX_CHECKED_BYTES / 1e3:.0f} kB of kernels; split this file"
            notes.append((chunk.start, chunk.start + len(chunk.text), reason))
        return notes

    def settle(self) -> bool:
        """Outline the whole file again if the incremental outline is uncertain. Returns whether the chunks changed."""
        before = self.outline
        if self.is_too_long or self._outliner.is_certain or self.text.root.has_error:
            return False
        self._outline = self._outliner.outline(self.text.source, self.text.root)
        return self._outline.chunks != before.chunks

    def check_syntax(self) -> bool:
        """Look for syntax errors, after a pause in typing. Returns whether they changed."""
        before = self.syntax_errors
        cached, too_deep = self._errors_by_chunk, {chunk.start for chunk in self.outline.too_deep}
        texts = [self.indented(chunk) for chunk in self.outline.chunks if chunk.start not in too_deep]
        self._errors_by_chunk = {text: cached[text] if text in cached else python_error(text) for text in texts}
        return self.syntax_errors != before

    @property
    def syntax_errors(self) -> list[PythonError]:
        """The first syntax error of each statement, in lines of the file. Statements that are being typed have none yet."""
        errors = ((chunk, self._errors_by_chunk.get(self.indented(chunk))) for chunk in self.outline.chunks)
        return [error.moved(chunk.line) for chunk, error in errors if error is not None]

    def indented(self, chunk: Chunk) -> bytes:
        """The text of a top-level statement with its indentation, which Python refuses."""
        start = line_start(self.text.data, chunk.start)
        indentation = self.text.data[start : chunk.start]
        return chunk.text if indentation.strip() else indentation + chunk.text

    def block_at(self, line: int) -> str | None:
        """The target whose generated block contains a 0-based line."""
        data = self.text.data
        line_start = self.text.offset(lsp.Position(line, 0))
        begin = data.rfind(f"{BEGIN} ".encode(), 0, line_start + len(self.text.line(line)))
        if begin < 0:
            return None
        name = self.text.line(self.text.position(begin).line)[len(BEGIN) + 1 :].strip()
        end = data.find(END.encode() + b" " + name, begin)
        return name.decode("utf-8", "replace") if end >= 0 and line_start <= end else None

    @property
    def findings(self) -> list[tuple[int, Finding]]:
        """Findings of the static checks, each with its base offset: the start of its chunk, or 0 for findings on save."""
        context, (checked, _) = context_of(self.outline), self._checked_chunks
        if context != self._context:
            self._context, self._findings_by_chunk = context, {}
        cached, self._findings_by_chunk = self._findings_by_chunk, {}
        for chunk in checked:
            self._findings_by_chunk[chunk.text] = (
                cached[chunk.text] if chunk.text in cached else check(chunk.text, context)
            )
        chunk_findings = [
            (chunk.start, finding) for chunk in checked for finding in self._findings_by_chunk[chunk.text]
        ]
        saved_text, save_findings = self.on_save
        return chunk_findings + [(0, finding) for finding in save_findings if saved_text is self.text.data]

    @property
    def _checked_chunks(self) -> tuple[list[Chunk], list[Chunk]]:
        """The statements that the static checks read, and those that they would read in a shorter file."""
        context, too_deep = context_of(self.outline), {chunk.start for chunk in self.outline.too_deep}
        candidates = [c for c in self.outline.chunks if c.start not in too_deep and is_checked(c.text, context)]
        ends = itertools.accumulate(len(chunk.text) for chunk in candidates)
        number = sum(end <= MAX_CHECKED_BYTES for end in ends)
        return candidates[:number], candidates[number:]


def has_kernels_of_author(document: Document, entry: OutlineEntry) -> bool:
    """Whether the kernels of the target are the author's: it is one, or its statement launches one of the file."""
    if entry.target.kind is not TargetKind.FUNCTION:
        return entry.target.kind is TargetKind.KERNEL
    kernels = {item.target.qualname for item in document.outline.targets if item.target.kind is TargetKind.KERNEL}
    return any(match[1].decode() in kernels for match in LAUNCH.finditer(entry.chunk.text))
