"""Find what can be optimised in a file: functions, methods, ``nn.Module`` classes and Triton kernels."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass

from tree_sitter import Node

from mtmc_lsp.core.errors import Location, SourceSyntaxError, TargetNotFound
from mtmc_lsp.core.workload import Target, TargetKind
from mtmc_lsp.source.syntax import field, first_error, line_of, parse, text_of


@dataclass(frozen=True)
class Definition:
    """A target with its place in the syntax tree."""

    target: Target
    node: Node
    """The ``def`` or ``class`` itself, decorators outside it."""


def find_targets(text: bytes, path: str) -> tuple[Target, ...]:
    """Every target of the file, in source order; a file with syntax errors gives those outside the errors."""
    return tuple(definition.target for definition in definitions(text, path))


def definitions(text: bytes, path: str) -> tuple[Definition, ...]:
    """Like :func:`find_targets`, with the syntax nodes."""
    root = parse(text)
    modules = _module_classes(root)
    return tuple(_walk(root, (), path, modules, in_module=False))


def find_target(text: bytes, path: str, name: str) -> Target:
    """The target called ``name``: its qualified name, or an ending of it that only one target has.

    Raises:
        TargetNotFound: there is none, or several.
        SourceSyntaxError: the target's own text does not parse.
    """
    return find_definition(text, path, name).target


def find_definition(text: bytes, path: str, name: str) -> Definition:
    """Like :func:`find_target`, with the syntax node."""
    known = definitions(text, path)
    exact = [item for item in known if item.target.qualname == name]
    # A name defined twice means the last definition, as at run time.
    found = exact[-1:] or [item for item in known if item.target.qualname.endswith(f".{name}")]
    if len(found) > 1:
        names = ", ".join(item.target.qualname for item in found)
        raise TargetNotFound(
            f"{name!r} could be any of {names}", where=Location(path), remedy="Give the qualified name."
        )
    if not found:
        raise _not_found(text, path, name, known)
    error = first_error(found[0].node)
    if error is not None:
        raise SourceSyntaxError(
            f"{found[0].target.qualname} does not parse",
            where=Location(path, line_of(error)),
            remedy="Mend the syntax error first.",
        )
    return found[0]


def target_at(text: bytes, path: str, line: int) -> Target | None:
    """The innermost target around a 1-based line."""
    around = [t for t in find_targets(text, path) if t.start_line <= line <= t.end_line]
    return min(around, key=lambda t: t.end_line - t.start_line, default=None)


def _not_found(text: bytes, path: str, name: str, known: tuple[Definition, ...]) -> Exception:
    error = first_error(parse(text))
    last = name.rpartition(".")[2].encode()
    if error is not None and last in text:
        return SourceSyntaxError(
            f"no {name!r}: the file does not parse here", where=Location(path, line_of(error)), remedy="Mend it first."
        )
    names = [item.target.qualname for item in known]
    close = difflib.get_close_matches(name, names, 3, 0.4) or names[:8]
    remedy = f"There is {', '.join(close)}." if close else "The file defines no function, module or kernel."
    return TargetNotFound(f"no function, method, module or kernel called {name!r}", where=Location(path), remedy=remedy)


def _module_classes(root: Node) -> set[str]:
    """Names of the classes in the file that are modules: by a base called ``...Module``, one in the file, or ``forward``."""
    classes: dict[str, tuple[list[str], bool]] = {}
    for node in _all(root, "class_definition"):
        name = field(node, "name")
        bases = field(node, "superclasses")
        body = field(node, "body")
        methods = [text_of(n) for f in (_all(body, "function_definition") if body else ()) if (n := field(f, "name"))]
        names = [text_of(base).rpartition(".")[2] for base in bases.named_children] if bases else []
        classes[text_of(name) if name else ""] = (names, "forward" in methods)
    found = {name for name, (bases, forward) in classes.items() if forward or any(b.endswith("Module") for b in bases)}
    while True:
        more = {name for name, (bases, _) in classes.items() if set(bases) & found} - found
        if not more:
            return found
        found |= more


def _all(node: Node, kind: str) -> Iterator[Node]:
    for child in node.children:
        if child.type == kind:
            yield child
        yield from _all(child, kind)


def _walk(node: Node, scope: tuple[str, ...], path: str, modules: set[str], *, in_module: bool) -> Iterator[Definition]:
    for child in node.children:
        decorated = child.type == "decorated_definition"
        inner = field(child, "definition") if decorated else child
        if inner is None or inner.type not in ("function_definition", "class_definition"):
            yield from _walk(child, scope, path, modules, in_module=in_module)
            continue
        name = field(inner, "name")
        if name is None:
            continue
        qualified = (*scope, text_of(name))
        is_class = inner.type == "class_definition"
        is_module = is_class and text_of(name) in modules
        kind = _kind(child, inner, is_class=is_class, is_module=is_module, in_module=in_module, scope=scope)
        if kind is not None:
            end = inner.end_point[0] + 1
            yield Definition(Target(path, ".".join(qualified), kind, line_of(inner), end), inner)
        body = field(inner, "body")
        if body is not None and is_class:
            yield from _walk(body, qualified, path, modules, in_module=is_module)


def _kind(
    outer: Node, inner: Node, *, is_class: bool, is_module: bool, in_module: bool, scope: tuple[str, ...]
) -> TargetKind | None:
    if is_class:
        return TargetKind.MODULE if is_module else None
    if any(child.type == "async" for child in inner.children):
        return None
    if outer.type == "decorated_definition" and any(_is_jit(d) for d in outer.children if d.type == "decorator"):
        return TargetKind.KERNEL
    if not scope:
        return TargetKind.FUNCTION
    return TargetKind.METHOD if in_module else None


def _is_jit(decorator: Node) -> bool:
    text = text_of(decorator).lstrip("@").split("(")[0].strip()
    return text == "jit" or text.endswith("triton.jit")
