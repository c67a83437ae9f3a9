"""Detects changes of the source that defines a version's dependencies. Compares text only; no user code runs."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from mtmc_lsp.core.dependencies import Dependency, DependencyKind
from mtmc_lsp.core.source_digest import source_digest
from mtmc_lsp.core.workload import Target
from mtmc_lsp.source.chunks import Chunk, chunks_of
from mtmc_lsp.source.syntax import parse

MAX_FILE_BYTES = 4 << 20
"""Maximum size of a file whose definitions are read."""
MAX_DEFINITIONS = 2000
"""Maximum number of definitions that are followed from one target."""
NEWLINE = re.compile("\r\n|\r|\n")
"""What ends a line of Python source."""


@dataclass(frozen=True)
class Definition:
    """One statement that binds a name. Its content is computed when it is needed: few of a file's definitions are read."""

    line: int
    """1-based."""
    source: str = ""
    """The lines of the statement, as indented in the file; empty for an import."""
    is_plain: bool = False
    """Whether the statement assigns its right-hand side to this name alone."""
    module: str = ""
    """Module of an import: ``cfg``, ``.cfg``."""
    imported: str = ""
    """Imported name; empty if the statement imports the module itself."""

    @property
    def digest(self) -> str:
        """Digest of the statement."""
        return _content(self.source).digest if self.source else f"{self.module}:{self.imported}"

    @property
    def reads(self) -> frozenset[str]:
        """Module-level names that the statement reads."""
        return _content(self.source).reads if self.source else frozenset()

    @property
    def value(self) -> str:
        """The right-hand side of a plain assignment."""
        return _content(self.source).value if self.is_plain else ""


@dataclass(frozen=True)
class Definitions:
    """All names that a file defines, including members of its classes (``Block.forward``)."""

    by_name: dict[str, tuple[Definition, ...]]

    def digest(self, qualname: str) -> str:
        """Digest of all statements that bind the name; empty if there are none."""
        return ".".join(item.digest for item in self.by_name.get(qualname, ()))


Finder = Callable[[str], Definitions | None]
"""Returns the definitions of a file by its absolute path; ``None`` if there is no such file."""


def definitions_of(chunks: Iterable[Chunk]) -> Definitions:
    """The definitions of a file's top-level statements."""
    definitions: dict[str, list[Definition]] = {}
    for chunk in chunks:
        for name, item in _defined(chunk.text):
            definitions.setdefault(name, []).append(replace(item, line=item.line + chunk.line))
    return Definitions({name: tuple(items) for name, items in definitions.items()})


def definitions_in(text: bytes) -> Definitions:
    """The definitions of a whole file."""
    return definitions_of(chunks_of(text, parse(text)).all)


def read_definitions(path: str) -> Definitions | None:
    """The definitions of a file on disk."""
    try:
        # Not a pipe or a device, which could be read for ever.
        if not os.path.isfile(path) or os.path.getsize(path) > MAX_FILE_BYTES:
            return None
        return definitions_in(Path(path).read_bytes())
    except OSError:
        return None


@lru_cache(maxsize=8192)
def _defined(text: bytes) -> tuple[tuple[str, Definition], ...]:
    try:
        source = text.decode("utf-8-sig")
        tree, lines = ast.parse(source), NEWLINE.split(source)
        return tuple(item for statement in tree.body for item in _of_statement(statement, "", "", lines))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # The last two: nested too deeply for Python.
        return ()


class _Content(NamedTuple):
    """What a statement contains."""

    digest: str
    reads: frozenset[str]
    value: str


@lru_cache(maxsize=8192)
def _content(source: str) -> _Content:
    is_indented = source[0].isspace()
    try:
        node = ast.parse(f"if True:\n{source}" if is_indented else source).body[0]
        if is_indented and isinstance(node, ast.If):
            node = node.body[0]
        value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
        return _Content(source_digest(ast.unparse(node)), _reads(node), ast.unparse(value) if value is not None else "")
    except (RecursionError, MemoryError):
        # Nested too deeply for Python.
        return _Content("", frozenset(), "")


def _source_of(node: ast.stmt, lines: Sequence[str]) -> str:
    """The text of a statement, with its indentation."""
    first = _first_line(node)
    text = [*lines[first - 1 : node.end_lineno]]
    text[-1] = text[-1].encode()[: node.end_col_offset].decode()
    before = text[0].encode()[: node.col_offset].decode()
    if before.strip() and first == node.lineno:
        # Another statement is on the same line.
        text[0] = " " * len(before) + text[0][len(before) :]
    return "\n".join(text)


def _first_line(node: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(item.lineno for item in decorators)])


def _of_statement(
    node: ast.stmt, prefix: str, enclosing: str, lines: Sequence[str]
) -> Iterator[tuple[str, Definition]]:
    """The names that a statement binds.

    Args:
        enclosing: the text of the enclosing ``if`` or ``try`` that decides whether the statement runs; empty if none does.
        lines: the lines of the file, or of the part of it that was parsed.
    """
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from _of_import(node, prefix)
        return
    source, line = enclosing or _source_of(node, lines), _first_line(node)
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield prefix + node.name, Definition(line, source)
        for inner in node.body if isinstance(node, ast.ClassDef) else ():
            yield from _of_statement(inner, f"{prefix}{node.name}.", enclosing, lines)
    elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        has_value = isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None and not enclosing
        names = [item for target in targets for item in ast.walk(target) if isinstance(item, ast.Name)]
        for name in names:
            is_alone = any(name is target for target in targets)
            yield prefix + name.id, Definition(line, source, has_value and is_alone)
    else:
        for item in ast.iter_child_nodes(node):
            if isinstance(item, ast.stmt):
                yield from _of_statement(item, prefix, source, lines)
            elif isinstance(item, ast.ExceptHandler):
                for inner in item.body:
                    yield from _of_statement(inner, prefix, source, lines)
            elif isinstance(node, (ast.For, ast.With)):
                for name in (n for n in ast.walk(item) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)):
                    yield prefix + name.id, Definition(line, source)


def _of_import(node: ast.Import | ast.ImportFrom, prefix: str) -> Iterator[tuple[str, Definition]]:
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            bound, imported = alias.asname or alias.name, alias.name
        else:
            module = alias.name if alias.asname else alias.name.split(".")[0]
            bound, imported = alias.asname or module, ""
        yield prefix + bound, Definition(node.lineno, module=module, imported=imported)


def _reads(node: ast.AST) -> frozenset[str]:
    """Names that code reads and does not bind itself."""
    loads = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return frozenset(loads)
    outside = [*node.decorator_list, *node.args.defaults, *(item for item in node.args.kw_defaults if item)]
    read_outside = {n.id for part in outside for n in ast.walk(part) if isinstance(n, ast.Name)}
    bound = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
    return frozenset((loads - bound - {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)}) | read_outside)


# Recording -----------------------------------------------------------------------------------------------------------


def with_definitions(
    recorded: Sequence[Dependency], target: Target, text: bytes, roots: Sequence[str]
) -> tuple[Dependency, ...]:
    """Add definition digests to the dependencies, and add the definitions that they depend on.

    Args:
        recorded: dependencies from the capture worker.
        target: the captured target; its own text is compared elsewhere.
        text: the target's file at the time of the capture.
        roots: folders for absolute imports.
    """
    files: dict[str, Definitions | None] = {target.path: definitions_in(text)}

    def find(path: str) -> Definitions | None:
        if path not in files:
            files[path] = read_definitions(path)
        return files[path]

    result: dict[tuple[str, str, str], Dependency] = {}
    pending = [
        *recorded,
        Dependency(target.qualname, DependencyKind.DEFINITION, path=target.path, qualname=target.qualname),
    ]
    followed: set[tuple[str, str]] = set()
    while pending and len(followed) < MAX_DEFINITIONS:
        item = pending.pop(0)
        file = find(item.path) if item.path else None
        defined = file.by_name.get(item.qualname, ()) if file is not None else ()
        is_target = item.path == target.path and f"{item.qualname}.".startswith(f"{target.qualname}.")
        if defined and file is not None:
            digest = "" if is_target else file.digest(item.qualname)
            item = replace(item, line=defined[-1].line, definition=digest)
        if item.definition or item.access:
            result.setdefault((item.path, item.name, item.access), item)
        if (item.path, item.qualname) in followed:
            continue
        followed.add((item.path, item.qualname))
        for definition in defined:
            if definition.imported:
                path = module_file(definition.module, item.path, roots)
                if path:
                    pending.append(replace(item, access="", path=path, qualname=definition.imported, definition=""))
            for name in sorted(definition.reads & file.by_name.keys() if file is not None else ()):
                pending.append(Dependency(name, DependencyKind.DEFINITION, path=item.path, qualname=name))
    specific = {(item.path, item.qualname) for item in result.values() if item.kind is not DependencyKind.DEFINITION}
    return tuple(
        item
        for item in result.values()
        if item.kind is not DependencyKind.DEFINITION or (item.path, item.qualname) not in specific
    )


def module_file(module: str, importer: str, roots: Sequence[str]) -> str:
    """The file of an imported module; empty if the module is outside ``roots``."""
    dots = len(module) - len(module.lstrip("."))
    folders = [Path(importer).parents[dots - 1]] if dots else [Path(importer).parent, *map(Path, roots)]
    parts = [part for part in module.lstrip(".").split(".") if part]
    for folder in folders:
        base = folder.joinpath(*parts)
        for path in (base.with_suffix(".py") if parts else base / "__init__.py", base / "__init__.py"):
            if path.is_file():
                return str(path)
    return ""


# Checking ------------------------------------------------------------------------------------------------------------


def changes(recorded: Sequence[Dependency], path: str, find: Finder) -> tuple[str, ...]:
    """Describe changes since the dependencies were recorded, one clause each: ``K (line 1) was 3 ..., is 5 now``."""
    clauses: dict[str, None] = {}
    for item in recorded:
        if item.definition:
            current = find(item.path)
            if current is None or current.digest(item.qualname) != item.definition:
                clauses[_change(item, path, current)] = None
    return tuple(clauses)


def _change(item: Dependency, path: str, current: Definitions | None) -> str:
    file = "" if item.path == path else f"{Path(item.path).name}, "
    defined = current.by_name.get(item.qualname, ()) if current is not None else ()
    if not defined:
        return f"{item.name} ({file}line {item.line} when this was verified) is no longer defined"
    location = f"{item.name} ({file}line {defined[-1].line})"
    value = defined[-1].value
    if item.kind is DependencyKind.VALUE and value and value != item.value:
        return f"{location} was {item.value} when this was verified, is {value} now"
    return f"{location} changed since this was verified"
