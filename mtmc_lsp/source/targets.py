"""Find what can be optimised in a file: functions, methods, ``nn.Module`` classes and Triton kernels."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tree_sitter import Node

from mtmc_lsp.core.errors import Location, RequestError, SourceSyntaxError, TargetNotFound
from mtmc_lsp.core.workload import Target, TargetKind
from mtmc_lsp.source.imports import bindings
from mtmc_lsp.source.syntax import (
    field,
    first_error,
    holds_statements,
    line_of,
    parse_apart,
    text_of,
    undecorated,
    walk,
    with_decorators,
)

NOT_CALLED = frozenset({"property", "cached_property", "setter", "deleter", "staticmethod", "classmethod", "overload"})
"""Decorators of what is not called as ``instance.method(...)`` or ``function(...)``."""


@dataclass(frozen=True)
class Definition:
    """A function or class with its place in the syntax tree."""

    target: Target
    node: Node
    """The ``def`` or ``class`` itself, decorators outside it."""


@dataclass(frozen=True)
class FileNames:
    """What the whole file says of its names."""

    path: str
    modules: frozenset[str]
    """Classes that are modules."""
    imports: dict[str, str]
    """Imported names, with the dotted paths behind them."""


@dataclass(frozen=True)
class ClassFacts:
    """What a class statement alone says on whether the class is a module."""

    name: str
    bases: tuple[str, ...]
    """Their last names."""
    has_forward: bool


def find_targets(text: bytes, path: str) -> tuple[Target, ...]:
    """Every target of the file, in source order; a file with syntax errors too gives what can be made out."""
    return tuple(definition.target for definition in definitions(text, path) if is_offered(definition))


def find_target(text: bytes, path: str, name: str) -> Target:
    """The target called ``name``: its qualified name, or an ending of it that only one target has.

    Raises:
        TargetNotFound: there is none, or several.
        SourceSyntaxError: the target's own text does not parse.
    """
    return find_definition(text, path, name).target


def target_at(text: bytes, path: str, line: int) -> Target | None:
    """The innermost target around a 1-based line, its decorators included."""
    around = [
        item.target
        for item in definitions(text, path)
        if is_offered(item) and line_of(with_decorators(item.node)) <= line <= item.target.end_line
    ]
    return min(around, key=lambda target: target.end_line - target.start_line, default=None)


def definitions(text: bytes, path: str) -> tuple[Definition, ...]:
    """Like :func:`find_targets`, with the syntax nodes; constructors, properties and static methods are here too."""
    intact, broken = parse_apart(text)
    roots = (intact, *broken)
    classes = [facts for root in roots for facts in class_facts(root)]
    imports = {found.name: found.module for root in roots for found in bindings(root)}
    names = FileNames(path, modules_among(classes), imports)
    found = [item for root in roots for item in definitions_below(root, names)]
    return tuple(sorted(found, key=lambda item: item.node.start_byte))


def find_definition(text: bytes, path: str, name: str) -> Definition:
    """Like :func:`find_target`, with the syntax node."""
    # A name defined twice means the last definition, as at run time.
    known = {item.target.qualname: item for item in definitions(text, path)}
    offered = {qualname: item for qualname, item in known.items() if is_offered(item)}
    found = [known[name]] if name in known else [item for key, item in offered.items() if key.endswith(f".{name}")]
    if len(found) > 1:
        names = ", ".join(item.target.qualname for item in found)
        raise TargetNotFound(
            f"{name!r} could be any of {names}", where=Location(path), remedy="Give the qualified name."
        )
    if not found:
        raise _not_found(text, path, name, list(offered))
    error = first_error(found[0].node)
    if error is not None:
        raise _unparsed(text, path, found[0].target.qualname, error)
    return found[0]


def is_offered(definition: Definition) -> bool:
    """Whether a user may want to optimise it: what is called on tensors."""
    name = definition.target.qualname.rpartition(".")[2]
    if definition.target.kind is TargetKind.METHOD and name.startswith("__") and name != "__call__":
        return False
    return not any(_decorator(item).rpartition(".")[2] in NOT_CALLED for item in _decorators(definition.node))


def _not_found(text: bytes, path: str, name: str, names: list[str]) -> RequestError:
    last = name.rpartition(".")[2]
    begun = rb"^[ \t]*(?:async[ \t]+def|def|class)[ \t]+" + re.escape(last.encode()) + rb"\b"
    said = re.search(begun, text, re.MULTILINE)
    if said is not None:
        line = text.count(b"\n", 0, said.start()) + 1
        for root in parse_apart(text)[1]:
            error = first_error(root)
            if error is not None and line <= root.end_point[0] + 1:
                return _unparsed(text, path, name, error)
        if all(known.rpartition(".")[2] != last for known in names):
            return TargetNotFound(
                f"{name!r} is no function, module, method of a module or kernel; it may be a static method, a property, "
                "a coroutine, or inside a function or another class",
                where=Location(path, line),
                remedy="Move its tensor code into a function of the file, and call that.",
            )
    close = difflib.get_close_matches(name, names, 3, 0.4) or names[:8]
    remedy = f"There is {', '.join(close)}." if close else "The file defines no function, module or kernel."
    return TargetNotFound(f"no function, method, module or kernel called {name!r}", where=Location(path), remedy=remedy)


def _unparsed(text: bytes, path: str, name: str, error: Node) -> SourceSyntaxError:
    """What is said of a target with an error in its own text."""
    where = Location(path, line_of(error))
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return SourceSyntaxError(f"{name} does not parse", where=where, remedy="Mend the syntax error first.")
    # tree-sitter gives up where a line inside brackets stands further left than the block it is in.
    return SourceSyntaxError(
        f"{name} cannot be read here, although Python can read it",
        where=where,
        remedy="Indent lines inside brackets as far as their statement, as formatters do.",
    )


def bases_of(node: Node) -> list[str]:
    """The last names of a class's bases: ``Module`` for ``torch.nn.Module``, ``Base`` for ``Base[T]``."""
    bases = field(node, "superclasses")
    plain = [base for base in bases.named_children if base.type != "keyword_argument"] if bases is not None else []
    return [text_of(base).split("[")[0].rpartition(".")[2] for base in plain]


def class_facts(root: Node) -> tuple[ClassFacts, ...]:
    """Every class below a node, however deep."""
    found = []
    for node in (item for item in walk(root) if item.type == "class_definition"):
        body = field(node, "body")
        own = [text_of(field(undecorated(child), "name")) for child in body.children] if body is not None else []
        found.append(ClassFacts(text_of(field(node, "name")), tuple(bases_of(node)), "forward" in own))
    return tuple(found)


def modules_among(classes: Iterable[ClassFacts]) -> frozenset[str]:
    """Classes that are modules: by a base called ``...Module``, by a base that is one, or by a ``forward``."""
    bases: dict[str, tuple[str, ...]] = {}
    found: set[str] = set()
    for facts in classes:
        bases[facts.name] = facts.bases
        # torch.autograd.Function has a static forward, and is never called as a module.
        by_base = any(base.endswith("Module") for base in facts.bases)
        if "Function" not in facts.bases and (facts.has_forward or by_base):
            found.add(facts.name)
    while more := {name for name, above in bases.items() if found.intersection(above)} - found:
        found |= more
    return frozenset(found)


def definitions_below(root: Node, names: FileNames) -> Iterator[Definition]:
    """The definitions in one tree, where the names of the whole file are known."""
    return _below(root, (), names, in_module=False)


def _below(node: Node, scope: tuple[str, ...], names: FileNames, *, in_module: bool) -> Iterator[Definition]:
    """Definitions in the statements of ``node``, however deep in ``if``, ``try`` and classes, not inside functions."""
    for child in node.children:
        inner = undecorated(child)
        if inner.type not in ("function_definition", "class_definition"):
            if holds_statements(child):
                yield from _below(child, scope, names, in_module=in_module)
            continue
        own = text_of(field(inner, "name"))
        if not own:
            continue
        qualified = (*scope, own)
        kind = _kind(inner, own, scope, names, in_module=in_module)
        if kind is not None:
            yield Definition(
                Target(names.path, ".".join(qualified), kind, line_of(inner), inner.end_point[0] + 1), inner
            )
        body = field(inner, "body")
        if body is not None and inner.type == "class_definition":
            yield from _below(body, qualified, names, in_module=own in names.modules)


def _kind(inner: Node, name: str, scope: tuple[str, ...], names: FileNames, *, in_module: bool) -> TargetKind | None:
    if inner.type == "class_definition":
        return TargetKind.MODULE if name in names.modules else None
    if any(child.type == "async" for child in inner.children):
        return None
    if any(_is_jit(_decorator(item), names.imports) for item in _decorators(inner)):
        return TargetKind.KERNEL
    if not scope:
        return TargetKind.FUNCTION
    return TargetKind.METHOD if in_module else None


def _decorators(node: Node) -> list[Node]:
    return [item for item in with_decorators(node).children if item.type == "decorator"]


def _decorator(node: Node) -> str:
    """The decorator's dotted name, without ``@`` and without its arguments."""
    return text_of(node).lstrip("@").split("(")[0].split("#")[0].strip()


def _is_jit(decorator: str, imports: dict[str, str]) -> bool:
    """Whether a decorator is Triton's ``jit``, under whatever name; names not imported are taken as written."""
    head, dot, rest = decorator.partition(".")
    path = (imports.get(head) or head) + dot + rest
    if path == "jit":
        return True
    return path.split(".")[0] == "triton" and path.endswith(".jit")
