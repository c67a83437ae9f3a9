"""What a file holds, kept up to date while it is edited: only the top-level statements that changed are read again.

A file is cut into chunks: a top-level statement with the comments that touch it from above. What is found out about a
chunk depends on its bytes alone (and, for the kind of a target, on the names of the whole file), so it is remembered by them.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from tree_sitter import Node

from mtmc_lsp.core.workload import Target, TargetKind
from mtmc_lsp.source.imports import bindings
from mtmc_lsp.source.syntax import first_error, line_of, parse, statements_by_margin, with_decorators
from mtmc_lsp.source.targets import (
    ClassFacts,
    FileNames,
    class_facts,
    definitions_below,
    is_offered,
    modules_among,
)

T = TypeVar("T")
DIRECTIVE = re.compile(rb"[ \t]*#\s*mtmc:(?!\s*(?:begin|end|dispatch|import|ignore)(?:[\s\[]|$))")

DEFINED = re.compile(rb"\bdef ([A-Za-z_]\w*)")
CALLED = re.compile(rb"\b([A-Za-z_]\w*)\(")
LAUNCH = re.compile(rb"\b([A-Za-z_]\w*)[ \t]*\[[^\[\]]*(?:\[[^\[\]]*\][^\[\]]*)*\][ \t]*\(")


@dataclass(frozen=True)
class Chunk:
    """A top-level statement with the comments above it."""

    start: int
    """Byte offset in the file."""
    line: int
    """0-based line of its first byte."""
    text: bytes


@dataclass(frozen=True)
class Outlined:
    """A target and its place; lines are 1-based and of the file."""

    target: Target
    first_line: int
    """Of its first decorator, or of the ``def``."""
    is_broken: bool
    """Whether its own text has a syntax error."""
    chunk: Chunk

    @property
    def has_directive(self) -> bool:
        """Whether a workload directive touches it, or the top-level statement that it is in, from above."""
        lines = self.chunk.text.split(b"\n")
        for row in (self.first_line - 1 - self.chunk.line, _first_code(lines)):
            while row > 0 and lines[row - 1].lstrip().startswith(b"#"):
                row -= 1
                if DIRECTIVE.match(lines[row]):
                    return True
        return False


@dataclass
class _Facts:
    """What is known of one chunk."""

    imports: dict[str, str]
    classes: tuple[ClassFacts, ...]
    launched: frozenset[str]
    """What it launches as kernels."""
    launchers: frozenset[str]
    """Functions in it, where it launches something."""
    called: frozenset[str]
    minds_layout: bool
    names: FileNames | None = None
    outlined: tuple[Outlined, ...] = ()
    """Relative to the chunk, for ``names``."""


@dataclass(frozen=True)
class Outline:
    """The chunks of one state of a file, and its targets."""

    text: bytes
    chunks: tuple[Chunk, ...]
    names: FileNames
    launched: frozenset[str]
    """Names that are launched as kernels somewhere: ``name[grid](...)``."""
    called: frozenset[str]
    """Those of its functions that launch kernels and are called somewhere in it."""
    minds_layout: bool
    """Whether it speaks of contiguous tensors anywhere."""
    _find: Callable[[Chunk], tuple[Outlined, ...]]

    @cached_property
    def targets(self) -> tuple[Outlined, ...]:
        """Every target that is offered, in source order; of a name defined twice, the last."""
        found = {item.target.qualname: item for chunk in self.chunks for item in self._find(chunk)}
        return tuple(sorted(found.values(), key=lambda item: item.first_line))

    @cached_property
    def by_name(self) -> dict[str, Outlined]:
        """Qualified name to target."""
        return {item.target.qualname: item for item in self.targets}

    def find(self, qualname: str) -> Outlined | None:
        """The target of that name, without placing all the others."""
        last = qualname.rpartition(".")[2].encode()
        for chunk in reversed(self.chunks):
            if last in chunk.text:
                for item in reversed(self._find(chunk)):
                    if item.target.qualname == qualname:
                        return item
        return None

    @cached_property
    def kernels(self) -> frozenset[str]:
        """Names of its Triton kernels."""
        found = (item for chunk in self.chunks if b"jit" in chunk.text for item in self._find(chunk))
        kernels = (item.target for item in found if item.target.kind is TargetKind.KERNEL)
        return frozenset(target.qualname.rpartition(".")[2] for target in kernels)

    def chunk_at(self, line: int) -> Chunk | None:
        """The chunk that a 0-based line is in."""
        index = bisect_right([chunk.line for chunk in self.chunks], line) - 1
        if index < 0:
            return None
        chunk = self.chunks[index]
        return chunk if line <= chunk.line + chunk.text.count(b"\n") else None

    def target_at(self, line: int) -> Outlined | None:
        """The innermost target around a 0-based line, decorators included."""
        chunk = self.chunk_at(line)
        around = [
            item
            for item in (self._find(chunk) if chunk is not None else ())
            if item.first_line <= line + 1 <= item.target.end_line
        ]
        return min(around, key=lambda item: item.target.end_line - item.first_line, default=None)


class Outliner:
    """Makes the outline of each state of one file."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._facts: dict[bytes, _Facts] = {}
        self._names = FileNames(path, frozenset(), {})

    def outline(self, text: bytes, root: Node) -> Outline:
        """The outline of ``text``, whose tree is ``root``."""
        chunks = tuple(_chunks(text, root))
        known, self._facts = self._facts, {}
        for chunk in chunks:
            self._facts[chunk.text] = known.get(chunk.text) or _facts(chunk.text)
        imports = {name: path for facts in self._facts.values() for name, path in facts.imports.items()}
        modules = modules_among(item for facts in self._facts.values() for item in facts.classes)
        names = FileNames(self._path, modules, imports)
        # One object while nothing changes, so that what depends on it is compared quickly.
        self._names = self._names if names == self._names else names
        facts = self._facts.values()
        launched = frozenset[str]().union(*(item.launched for item in facts))
        launchers = frozenset[str]().union(*(item.launchers for item in facts))
        # Only launchers: whatever else is called, nothing is to be looked at anew because of it.
        called = launchers & frozenset[str]().union(*(item.called for item in facts))
        minds_layout = any(item.minds_layout for item in facts)
        return Outline(text, chunks, self._names, launched, called, minds_layout, self._outlined)

    def _outlined(self, chunk: Chunk) -> tuple[Outlined, ...]:
        facts = self._facts.get(chunk.text) or self._facts.setdefault(chunk.text, _facts(chunk.text))
        if facts.names is not self._names:
            root = parse(chunk.text)
            facts.names = self._names
            facts.outlined = tuple(
                Outlined(item.target, line_of(with_decorators(item.node)), first_error(item.node) is not None, chunk)
                for item in definitions_below(root, self._names)
                if is_offered(item)
            )
        return tuple(_placed(item, chunk) for item in facts.outlined)


def _first_code(lines: list[bytes]) -> int:
    return next((row for row, line in enumerate(lines) if not line.lstrip().startswith(b"#")), 0)


def _placed(item: Outlined, chunk: Chunk) -> Outlined:
    target = item.target
    moved = replace(target, start_line=target.start_line + chunk.line, end_line=target.end_line + chunk.line)
    return Outlined(moved, item.first_line + chunk.line, item.is_broken, chunk)


def _facts(text: bytes) -> _Facts:
    root = parse(text)
    imports = {found.name: found.module for found in bindings(root)}
    launched = frozenset(match[1].decode() for match in LAUNCH.finditer(text))
    launchers = frozenset(match[1].decode() for match in DEFINED.finditer(text)) if launched else frozenset[str]()
    called = frozenset(match[1].decode() for match in CALLED.finditer(text) if not _is_definition(text, match))
    classes = class_facts(root) if b"class" in text else ()
    return _Facts(imports, classes, launched, launchers, called, b"contiguous" in text or b"input_guard" in text)


def _is_definition(text: bytes, match: re.Match[bytes]) -> bool:
    return text[: match.start()].endswith(b"def ")


def _chunks(text: bytes, root: Node) -> Iterator[Chunk]:
    line, at = 0, 0
    for start, end in _ranges(text, root):
        line += text.count(b"\n", at, start)
        at = start
        yield Chunk(start, line, text[start:end])


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
        yield from zip(starts, [*starts[1:], len(text)][: len(starts)], strict=True)
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
