"""Find the targets in a file: functions, methods, ``nn.Module`` classes and Triton kernels."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tree_sitter import Node

from mtmc_lsp.core.errors import Location, RequestError, SourceSyntaxError, TargetNotFound
from mtmc_lsp.core.workload import Target, TargetKind
from mtmc_lsp.source.blocks import without_blocks
from mtmc_lsp.source.dispatch.lambdas import assigned_lambdas
from mtmc_lsp.source.imports import bindings
from mtmc_lsp.source.nested_functions import TopLevel, enclosing, obstacle
from mtmc_lsp.source.refused_definitions import assigned_callable, unsupported_definition
from mtmc_lsp.source.syntax import (
    field,
    first_error,
    holds_statements,
    line_of,
    parse_with_recovery,
    text_of,
    undecorated,
    walk,
    with_decorators,
)

UNSUPPORTED_DECORATORS = frozenset({"property", "cached_property", "setter", "deleter", "overload"})
"""Decorators of functions that are not called as ``instance.method(...)`` or ``function(...)``."""
OF_CLASS = ("staticmethod", "classmethod")
"""Decorators of functions that are called as ``Class.method(...)``, without an instance."""
AUTOGRAD_METHODS = frozenset({"forward", "backward", "setup_context", "jvp", "vmap"})
"""Static methods of ``torch.autograd.Function``, which autograd calls with a context."""


@dataclass(frozen=True)
class Definition:
    """A function or class and its syntax node."""

    target: Target
    node: Node
    """The ``def`` or ``class``, without decorators, or the ``lambda`` that a top-level statement assigns."""


@dataclass(frozen=True)
class FileNames:
    """Facts about names in the whole file."""

    path: str
    modules: frozenset[str]
    """Classes that are ``nn.Module`` classes."""
    imports: dict[str, str]
    """Imported name to its dotted path."""


@dataclass(frozen=True)
class ClassSummary:
    """The part of a class statement that decides whether the class is a module."""

    name: str
    bases: tuple[str, ...]
    """Last components of the base names."""
    has_forward: bool


def find_targets(text: bytes, path: str) -> tuple[Target, ...]:
    """Every target of the file, in source order. In a file with syntax errors, the ones that can be recognised."""
    return tuple(definition.target for definition in definitions(text, path) if is_offered(definition))


def find_target(text: bytes, path: str, name: str) -> Target:
    """The target called ``name``: a qualified name, or a unique suffix of one.

    Raises:
        TargetNotFound: no target or several targets match.
        SourceSyntaxError: the target's source does not parse.
    """
    return find_definition(text, path, name).target


def target_at(text: bytes, path: str, line: int) -> Target | None:
    """The innermost target that contains a 1-based line, decorators included."""
    enclosing = [
        item.target
        for item in definitions(text, path)
        if is_offered(item) and line_of(with_decorators(item.node)) <= line <= item.target.end_line
    ]
    return min(enclosing, key=lambda target: target.end_line - target.start_line, default=None)


def definitions(text: bytes, path: str) -> tuple[Definition, ...]:
    """Like :func:`find_targets`, with syntax nodes, and including constructors, properties and static methods."""
    intact, broken = parse_with_recovery(text)
    roots = (intact, *broken)
    classes = [summary for root in roots for summary in class_summaries(root)]
    imports = {binding.name: binding.module for root in roots for binding in bindings(root)}
    names = FileNames(path, module_classes(classes), imports)
    binding = [item for root in roots for item in definitions_in(root, names)]
    return tuple(sorted(binding, key=lambda item: item.node.start_byte))


def find_definition(text: bytes, path: str, name: str) -> Definition:
    """Like :func:`find_target`, with the syntax node."""
    # If a name is defined twice, the last definition counts, as at run time.
    by_name = {item.target.qualname: item for item in definitions(text, path)}
    offered = {qualname: item for qualname, item in by_name.items() if is_offered(item)}
    matches = (
        [by_name[name]] if name in by_name else [item for key, item in offered.items() if key.endswith(f".{name}")]
    )
    if len(matches) > 1:
        names = ", ".join(item.target.qualname for item in matches)
        raise TargetNotFound(
            f"{name!r} could be any of {names}", where=Location(path), remedy="Give the qualified name."
        )
    if not matches:
        # Not the kernels and helpers of generated code.
        written = {item.target.qualname for item in definitions(without_blocks(text, marked_imports=False), path)}
        raise _not_found(text, path, name, [qualname for qualname in offered if qualname in written])
    error = first_error(matches[0].node)
    if error is not None:
        raise _syntax_error(text, path, matches[0].target.qualname, error)
    return matches[0]


def is_offered(definition: Definition) -> bool:
    """Whether the user may select it as a target: a function that is called on tensors."""
    name = definition.target.qualname.rpartition(".")[2]
    if definition.target.kind is TargetKind.FUNCTION and "." in definition.target.qualname and name in AUTOGRAD_METHODS:
        return False
    if definition.target.kind is TargetKind.METHOD and name.startswith("__") and name != "__call__":
        return False
    return not any(
        _decorator(item).rpartition(".")[2] in UNSUPPORTED_DECORATORS for item in _decorators(definition.node)
    )


def _not_found(text: bytes, path: str, name: str, names: list[str]) -> RequestError:
    last = name.rpartition(".")[2]
    definition_start = rb"^[ \t]*(?:async[ \t]+def|def|class)[ \t]+" + re.escape(last.encode()) + rb"\b"
    definition = re.search(definition_start, text, re.MULTILINE)
    if definition is not None:
        line = text.count(b"\n", 0, definition.start()) + 1
        for root in parse_with_recovery(text)[1]:
            error = first_error(root)
            if error is not None and line <= root.end_point[0] + 1:
                return _syntax_error(text, path, name, error)
        if all(existing.rpartition(".")[2] != last for existing in names):
            problem, remedy = unsupported_definition(text, last)
            return TargetNotFound(f"{name!r} {problem}", where=Location(path, line), remedy=remedy)
    assigned = assigned_callable(text, name)
    if assigned is not None:
        line, problem, remedy = assigned
        return TargetNotFound(f"{name!r} {problem}", where=Location(path, line), remedy=remedy)
    close = difflib.get_close_matches(name, names, 3, 0.4) or names[:8]
    remedy = f"Available targets: {', '.join(close)}." if close else "The file defines no function, module or kernel."
    return TargetNotFound(f"no function, method, module or kernel called {name!r}", where=Location(path), remedy=remedy)


def _syntax_error(text: bytes, path: str, name: str, error: Node) -> SourceSyntaxError:
    """The error for a target whose source has a syntax error."""
    where = Location(path, line_of(error))
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return SourceSyntaxError(f"{name} does not parse", where=where, remedy="Correct the syntax error first.")
    # tree-sitter fails if a line inside brackets is indented less than its block.
    return SourceSyntaxError(
        f"{name} cannot be read here, although Python can read it",
        where=where,
        remedy="Indent lines inside brackets as far as their statement, as formatters do.",
    )


def bases_of(node: Node) -> list[str]:
    """Last components of a class's base names: ``Module`` for ``torch.nn.Module``, ``Base`` for ``Base[T]``."""
    bases = field(node, "superclasses")
    plain = [base for base in bases.named_children if base.type != "keyword_argument"] if bases is not None else []
    return [text_of(base).split("[")[0].rpartition(".")[2] for base in plain]


def class_summaries(root: Node) -> tuple[ClassSummary, ...]:
    """All classes in a tree, at any depth."""
    classes = []
    for node in (item for item in walk(root) if item.type == "class_definition"):
        body = field(node, "body")
        methods = [text_of(field(undecorated(child), "name")) for child in body.children] if body is not None else []
        classes.append(ClassSummary(text_of(field(node, "name")), tuple(bases_of(node)), "forward" in methods))
    return tuple(classes)


def module_classes(classes: Iterable[ClassSummary]) -> frozenset[str]:
    """Classes that are modules: a base is called ``...Module`` or is a module, or the class has a ``forward``."""
    bases: dict[str, tuple[str, ...]] = {}
    modules: set[str] = set()
    for summary in classes:
        bases[summary.name] = summary.bases
        # torch.autograd.Function has a static forward and is never called as a module.
        by_base = any(base.endswith("Module") for base in summary.bases)
        if "Function" not in summary.bases and (summary.has_forward or by_base):
            modules.add(summary.name)
    while derived := {name for name, base_names in bases.items() if modules.intersection(base_names)} - modules:
        modules |= derived
    return frozenset(modules)


def definitions_in(root: Node, names: FileNames) -> Iterator[Definition]:
    """The definitions in one tree, using the names of the whole file."""
    return _definitions_in(root, (), names, in_module=False)


def _definitions_in(
    node: Node, scope: tuple[str, ...], names: FileNames, *, in_module: bool, top: TopLevel | None = None
) -> Iterator[Definition]:
    """Definitions in the statements of ``node``, also inside ``if``, ``try``, classes and functions.

    Inside functions, only the functions that can be called without the outer one. ``top`` is the statement around ``node``.
    """
    for child in node.children:
        around = top or TopLevel(child)
        inner = undecorated(child)
        for name, function in () if scope else assigned_lambdas(child):
            yield Definition(
                Target(names.path, name, TargetKind.FUNCTION, line_of(function), function.end_point[0] + 1), function
            )
        if inner.type not in ("function_definition", "class_definition"):
            if holds_statements(child):
                yield from _definitions_in(child, scope, names, in_module=in_module, top=around)
            continue
        name = text_of(field(inner, "name"))
        if not name:
            continue
        qualified = (*scope, name)
        kind = _kind(inner, name, scope, names, in_module=in_module)
        if kind is not None and obstacle(inner, around) is None:
            yield Definition(
                Target(names.path, ".".join(qualified), kind, line_of(inner), inner.end_point[0] + 1), inner
            )
        body = field(inner, "body")
        if body is not None and inner.type == "class_definition":
            # A class inside a function exists only while the function runs.
            if not _is_in_function(inner):
                yield from _definitions_in(body, qualified, names, in_module=name in names.modules, top=around)
        elif body is not None:
            yield from _definitions_in(body, qualified, names, in_module=False, top=around)


def _kind(inner: Node, name: str, scope: tuple[str, ...], names: FileNames, *, in_module: bool) -> TargetKind | None:
    is_nested = _is_in_function(inner)
    if inner.type == "class_definition":
        return TargetKind.MODULE if name in names.modules and not is_nested else None
    if any(child.type == "async" for child in inner.children):
        return None
    if any(_is_jit(_decorator(item), names.imports) for item in _decorators(inner)):
        return TargetKind.KERNEL
    if not scope or is_nested or any(_decorator(item) in OF_CLASS for item in _decorators(inner)):
        return TargetKind.FUNCTION
    return TargetKind.METHOD if in_module else None


def _is_in_function(node: Node) -> bool:
    outer = enclosing(node)
    return outer is not None and outer.type == "function_definition"


def is_class_method(node: Node) -> bool:
    """Whether a function gets its class as the first argument."""
    return any(_decorator(item) == "classmethod" for item in _decorators(node))


def _decorators(node: Node) -> list[Node]:
    return [item for item in with_decorators(node).children if item.type == "decorator"]


def _decorator(node: Node) -> str:
    """Dotted name of the decorator, without ``@`` and arguments."""
    return text_of(node).lstrip("@").split("(")[0].split("#")[0].strip()


def _is_jit(decorator: str, imports: dict[str, str]) -> bool:
    """Whether a decorator is Triton's ``jit``, resolving imports; other names are used as written."""
    head, dot, rest = decorator.partition(".")
    path = (imports.get(head) or head) + dot + rest
    if path == "jit":
        return True
    return path.split(".")[0] == "triton" and path.endswith(".jit")
