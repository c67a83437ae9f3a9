"""Targets of a file, updated while it is edited: only the changed top-level statements are parsed again.

The facts about a chunk (see ``chunks.py``) depend only on its bytes, and for the kind of a target on the names in the whole file.
So they are cached by these.
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
from mtmc_lsp.source.chunks import Change, Chunk, Chunks, chunks_of, splice
from mtmc_lsp.source.imports import bindings
from mtmc_lsp.source.syntax import first_error, is_too_deep, line_of, parse, with_decorators
from mtmc_lsp.source.targets import (
    ClassSummary,
    FileNames,
    class_summaries,
    definitions_in,
    is_offered,
    module_classes,
)

DIRECTIVE = re.compile(rb"[ \t]*#\s*mtmc:(?!\s*(?:begin|end|dispatch|import|ignore)(?:[\s\[]|$))")

DEFINED = re.compile(rb"\bdef ([A-Za-z_]\w*)")
CALLED = re.compile(rb"\b([A-Za-z_]\w*)\(")
LAUNCH = re.compile(rb"\b([A-Za-z_]\w*)[ \t]*\[[^\[\]]*(?:\[[^\[\]]*\][^\[\]]*)*\][ \t]*\(")


ARANGE = re.compile(rb"\barange\(\s*0\s*,\s*([A-Za-z_]\w*)\s*\)")


class BlockParameter(NamedTuple):
    """A compile-time parameter of a kernel that is the size of a block."""

    kernel: str
    parameter: str
    is_stride: bool
    """Whether the first elements of two programs are this far apart: ``program_id(0) * BLOCK``."""


@dataclass(frozen=True)
class OutlineEntry:
    """A target and its position; lines are 1-based in the file."""

    target: Target
    first_line: int
    """Line of its first decorator, or of the ``def``."""
    is_broken: bool
    """Whether its source has a syntax error."""
    chunk: Chunk

    @property
    def has_directive(self) -> bool:
        """Whether a workload directive is directly above it or above its top-level statement."""
        lines = self.chunk.text.split(b"\n")
        for row in (self.first_line - 1 - self.chunk.line, _first_code(lines)):
            while row > 0 and lines[row - 1].lstrip().startswith(b"#"):
                row -= 1
                if DIRECTIVE.match(lines[row]):
                    return True
        return False


class _SharedFacts(NamedTuple):
    """Facts about one chunk that the rest of the file depends on."""

    imports: dict[str, str]
    classes: tuple[ClassSummary, ...]
    launched: frozenset[str]
    """Names that it launches as kernels."""
    launchers: frozenset[str]
    """Functions that it defines, if it launches a kernel."""
    called: frozenset[str]
    mentions_layout: bool
    blocks: tuple[BlockParameter, ...] = ()
    is_too_deep: bool = False
    """Whether it is nested too deeply to be analysed."""


@dataclass
class _ChunkFacts:
    """Facts about one chunk."""

    shared: _SharedFacts
    names: FileNames | None = None
    outlined: tuple[OutlineEntry, ...] = ()
    """Positions relative to the chunk, computed for ``names``."""


@dataclass(frozen=True)
class Outline:
    """The chunks of one version of a file, and its targets."""

    text: bytes
    chunks: tuple[Chunk, ...]
    names: FileNames
    launched: frozenset[str]
    """Names that are launched as kernels: ``name[grid](...)``."""
    called: frozenset[str]
    """Functions of the file that launch kernels and are called in the file."""
    mentions_layout: bool
    """Whether the file mentions contiguous tensors."""
    blocks: tuple[BlockParameter, ...]
    """The block sizes of the file's kernels."""
    _find: Callable[[Chunk], tuple[OutlineEntry, ...]]
    _is_too_deep: Callable[[Chunk], bool]

    @cached_property
    def too_deep(self) -> tuple[Chunk, ...]:
        """The chunks that are nested too deeply to be analysed. They have no targets."""
        return tuple(filter(self._is_too_deep, self.chunks))

    @cached_property
    def targets(self) -> tuple[OutlineEntry, ...]:
        """Every selectable target, in source order; for a name defined twice, the last definition."""
        targets = {item.target.qualname: item for chunk in self.chunks for item in self._find(chunk)}
        return tuple(sorted(targets.values(), key=lambda item: item.first_line))

    @cached_property
    def by_name(self) -> dict[str, OutlineEntry]:
        """Qualified name to target."""
        return {item.target.qualname: item for item in self.targets}

    def find(self, qualname: str) -> OutlineEntry | None:
        """The target with this qualified name, found without computing all others."""
        last = qualname.rpartition(".")[2].encode()
        for chunk in reversed(self.chunks):
            if last in chunk.text:
                for item in reversed(self._find(chunk)):
                    if item.target.qualname == qualname:
                        return item
        return None

    @cached_property
    def kernels(self) -> frozenset[str]:
        """Names of the file's Triton kernels."""
        entries = (item for chunk in self.chunks if b"jit" in chunk.text for item in self._find(chunk))
        kernels = (item.target for item in entries if item.target.kind is TargetKind.KERNEL)
        return frozenset(target.qualname.rpartition(".")[2] for target in kernels)

    def chunk_at(self, line: int) -> Chunk | None:
        """The chunk that contains a 0-based line."""
        index = bisect_right([chunk.line for chunk in self.chunks], line) - 1
        if index < 0:
            return None
        chunk = self.chunks[index]
        return chunk if line <= chunk.line + chunk.text.count(b"\n") else None

    def target_at(self, line: int) -> OutlineEntry | None:
        """The innermost target that contains a 0-based line, decorators included."""
        chunk = self.chunk_at(line)
        enclosing = [
            item
            for item in (self._find(chunk) if chunk is not None else ())
            if item.first_line <= line + 1 <= item.target.end_line
        ]
        return min(enclosing, key=lambda item: item.target.end_line - item.first_line, default=None)


class Outliner:
    """Computes the outline of each version of one file."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._facts: dict[bytes, _ChunkFacts] = {}
        self._names = FileNames(path, frozenset(), {})
        self._chunks = Chunks(())
        self._outline: Outline | None = None

    @property
    def is_certain(self) -> bool:
        """Whether parsing the whole file would give the same outline. Not certain near a syntax error."""
        return self._chunks.is_certain

    def empty(self, text: bytes) -> Outline:
        """An outline without chunks, of a text that is not analysed."""
        self._outline = None
        return replace(self.outline(b"", parse(b"")), text=text)

    def outline(self, text: bytes, root: Node) -> Outline:
        """Outline of ``text`` with the syntax tree ``root``."""
        self._chunks = chunks_of(text, root)
        self._update_facts(self._chunks.all)
        self._outline = self._build(text)
        return self._outline

    def edited(self, text: bytes, change: Change) -> Outline | None:
        """Outline after a change to the last text; ``None`` if the whole text must be parsed."""
        spliced = splice(self._chunks, text, change) if self._outline is not None else None
        if self._outline is None or spliced is None:
            return None
        removed_facts = [self._facts[chunk.text].shared for chunk in spliced.removed]
        self._chunks = spliced.chunks
        self._update_facts(self._chunks.all)
        is_unchanged = removed_facts == [self._facts[chunk.text].shared for chunk in spliced.new]
        # Most keystrokes change nothing that the rest of the file depends on.
        unchanged_outline = replace(self._outline, text=text, chunks=self._chunks.all) if is_unchanged else None
        self._outline = unchanged_outline or self._build(text)
        return self._outline

    def _update_facts(self, chunks: tuple[Chunk, ...]) -> None:
        """Compute the facts of these chunks and drop those of other chunks."""
        previous, self._facts = self._facts, {}
        for chunk in chunks:
            self._facts[chunk.text] = previous.get(chunk.text) or _facts(chunk.text)

    def _build(self, text: bytes) -> Outline:
        shared_facts = [facts.shared for facts in self._facts.values()]
        imports = {name: path for shared in shared_facts for name, path in shared.imports.items()}
        modules = module_classes(item for shared in shared_facts for item in shared.classes)
        names = FileNames(self._path, modules, imports)
        # Keep the same object while nothing changes, so that comparisons of dependent data are fast.
        self._names = self._names if names == self._names else names
        launched = frozenset[str]().union(*(shared.launched for shared in shared_facts))
        launchers = frozenset[str]().union(*(shared.launchers for shared in shared_facts))
        # Only launchers: calls of other functions must not invalidate other chunks.
        called = launchers & frozenset[str]().union(*(shared.called for shared in shared_facts))
        mentions_layout = any(shared.mentions_layout for shared in shared_facts)
        return Outline(
            text,
            self._chunks.all,
            self._names,
            launched,
            called,
            mentions_layout,
            tuple(block for shared in shared_facts for block in shared.blocks),
            self._entries_of,
            lambda chunk: self._facts_of(chunk).shared.is_too_deep,
        )

    def _facts_of(self, chunk: Chunk) -> _ChunkFacts:
        return self._facts.get(chunk.text) or self._facts.setdefault(chunk.text, _facts(chunk.text))

    def _entries_of(self, chunk: Chunk) -> tuple[OutlineEntry, ...]:
        facts = self._facts_of(chunk)
        if facts.names is not self._names and not facts.shared.is_too_deep:
            root = parse(chunk.text)
            facts.names = self._names
            facts.outlined = tuple(
                OutlineEntry(
                    item.target, line_of(with_decorators(item.node)), first_error(item.node) is not None, chunk
                )
                for item in definitions_in(root, self._names)
                if is_offered(item)
            )
        return tuple(_in_file(item, chunk) for item in facts.outlined)


def _first_code(lines: list[bytes]) -> int:
    return next((row for row, line in enumerate(lines) if not line.lstrip().startswith(b"#")), 0)


def _in_file(item: OutlineEntry, chunk: Chunk) -> OutlineEntry:
    target = item.target
    target_in_file = replace(target, start_line=target.start_line + chunk.line, end_line=target.end_line + chunk.line)
    return OutlineEntry(target_in_file, item.first_line + chunk.line, item.is_broken, chunk)


def _facts(text: bytes) -> _ChunkFacts:
    root = parse(text)
    if is_too_deep(root):
        return _ChunkFacts(_SharedFacts({}, (), frozenset(), frozenset(), frozenset(), False, is_too_deep=True))
    imports = {binding.name: binding.module for binding in bindings(root)}
    launched = frozenset(match[1].decode() for match in LAUNCH.finditer(text))
    launchers = frozenset(match[1].decode() for match in DEFINED.finditer(text)) if launched else frozenset[str]()
    called = frozenset(match[1].decode() for match in CALLED.finditer(text) if not _is_definition(text, match))
    classes = class_summaries(root) if b"class" in text else ()
    mentions_layout = b"contiguous" in text or b"input_guard" in text
    blocks = _block_parameters(text) if b"jit" in text and b"arange" in text else ()
    return _ChunkFacts(_SharedFacts(imports, classes, launched, launchers, called, mentions_layout, blocks))


def _block_parameters(text: bytes) -> tuple[BlockParameter, ...]:
    """The block sizes among the parameters of the kernel that a statement defines."""
    kernel = DEFINED.search(text)
    found = []
    for name in dict.fromkeys(ARANGE.findall(text)) if kernel is not None else ():
        word = re.escape(name)
        if kernel is not None and re.search(rb"\b" + word + rb"\s*:\s*[\w.]*constexpr", text):
            stride = rb"program_id\(\s*(?:axis\s*=\s*)?0\s*\)\s*\*\s*" + word + rb"\b"
            is_stride = re.search(stride, text) is not None or _multiplies_program_id(text, word)
            found.append(BlockParameter(kernel[1].decode(), name.decode(), is_stride))
    return tuple(found)


def _multiplies_program_id(text: bytes, parameter: bytes) -> bool:
    """Whether a variable that is ``program_id(0)`` is multiplied by a parameter."""
    names = re.findall(rb"\b([A-Za-z_]\w*)\s*=\s*\w+\.program_id\(\s*(?:axis\s*=\s*)?0\s*\)", text)
    return any(re.search(rb"\b" + name + rb"\s*\*\s*" + parameter + rb"\b", text) for name in names)


def _is_definition(text: bytes, match: re.Match[bytes]) -> bool:
    return text[: match.start()].endswith(b"def ")
