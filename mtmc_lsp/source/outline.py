"""What a file holds, kept up to date while it is edited: only the top-level statements that changed are read again.

What is found out about a chunk of it (``chunks.py``) depends on its bytes alone (and, for the kind of a target, on the names of
the whole file), so it is remembered by them.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from tree_sitter import Node

from mtmc_lsp.core.workload import Target, TargetKind
from mtmc_lsp.source.chunks import Change, Chunk, Chunks, chunks_of, spliced
from mtmc_lsp.source.imports import bindings
from mtmc_lsp.source.syntax import first_error, line_of, parse, with_decorators
from mtmc_lsp.source.targets import (
    ClassFacts,
    FileNames,
    class_facts,
    definitions_below,
    is_offered,
    modules_among,
)

DIRECTIVE = re.compile(rb"[ \t]*#\s*mtmc:(?!\s*(?:begin|end|dispatch|import|ignore)(?:[\s\[]|$))")

DEFINED = re.compile(rb"\bdef ([A-Za-z_]\w*)")
CALLED = re.compile(rb"\b([A-Za-z_]\w*)\(")
LAUNCH = re.compile(rb"\b([A-Za-z_]\w*)[ \t]*\[[^\[\]]*(?:\[[^\[\]]*\][^\[\]]*)*\][ \t]*\(")


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


class _Shared(NamedTuple):
    """What one chunk says to the rest of its file."""

    imports: dict[str, str]
    classes: tuple[ClassFacts, ...]
    launched: frozenset[str]
    """What it launches as kernels."""
    launchers: frozenset[str]
    """Functions in it, where it launches something."""
    called: frozenset[str]
    minds_layout: bool


@dataclass
class _Facts:
    """What is known of one chunk."""

    shared: _Shared
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
        self._chunks = Chunks(())
        self._outline: Outline | None = None

    @property
    def is_certain(self) -> bool:
        """Whether the whole file would give the last outline: not where something broken may reach further than it seems."""
        return self._chunks.is_certain

    def outline(self, text: bytes, root: Node) -> Outline:
        """The outline of ``text``, whose tree is ``root``."""
        self._chunks = chunks_of(text, root)
        self._read(self._chunks.all)
        self._outline = self._whole(text)
        return self._outline

    def edited(self, text: bytes, change: Change) -> Outline | None:
        """The outline of ``text``, which is that of the last one with a change; ``None`` where all of it must be read."""
        found = spliced(self._chunks, text, change) if self._outline is not None else None
        if self._outline is None or found is None:
            return None
        said = [self._facts[chunk.text].shared for chunk in found.gone]
        self._chunks = found.chunks
        self._read(self._chunks.all)
        is_alike = said == [self._facts[chunk.text].shared for chunk in found.new]
        # Most keystrokes change nothing that the rest of the file needs to know.
        alike = replace(self._outline, text=text, chunks=self._chunks.all) if is_alike else None
        self._outline = alike or self._whole(text)
        return self._outline

    def _read(self, chunks: tuple[Chunk, ...]) -> None:
        """Have the facts of these chunks, and no others."""
        known, self._facts = self._facts, {}
        for chunk in chunks:
            self._facts[chunk.text] = known.get(chunk.text) or _facts(chunk.text)

    def _whole(self, text: bytes) -> Outline:
        every = [facts.shared for facts in self._facts.values()]
        imports = {name: path for shared in every for name, path in shared.imports.items()}
        modules = modules_among(item for shared in every for item in shared.classes)
        names = FileNames(self._path, modules, imports)
        # One object while nothing changes, so that what depends on it is compared quickly.
        self._names = self._names if names == self._names else names
        launched = frozenset[str]().union(*(shared.launched for shared in every))
        launchers = frozenset[str]().union(*(shared.launchers for shared in every))
        # Only launchers: whatever else is called, nothing is to be looked at anew because of it.
        called = launchers & frozenset[str]().union(*(shared.called for shared in every))
        minds_layout = any(shared.minds_layout for shared in every)
        return Outline(text, self._chunks.all, self._names, launched, called, minds_layout, self._outlined)

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
    minds_layout = b"contiguous" in text or b"input_guard" in text
    return _Facts(_Shared(imports, classes, launched, launchers, called, minds_layout))


def _is_definition(text: bytes, match: re.Match[bytes]) -> bool:
    return text[: match.start()].endswith(b"def ")
