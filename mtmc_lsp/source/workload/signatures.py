"""Parameters of functions and constructors, read from the source."""

from __future__ import annotations

from dataclasses import dataclass

from tree_sitter import Node

from mtmc_lsp.core.workload import ContainerKind, Target, TargetKind
from mtmc_lsp.source.syntax import field, line_of, text_of
from mtmc_lsp.source.targets import Definition, bases_of, definitions, is_class_method


@dataclass(frozen=True)
class Parameter:
    """One parameter, without ``self``."""

    name: str
    annotation: str
    """Source text; empty if there is none."""
    has_default: bool
    line: int
    default: str = ""
    """Source text; empty if there is none."""
    further: ContainerKind | None = None
    """The kind of ``*args`` and ``**kwargs``."""


@dataclass(frozen=True)
class Signature:
    """The parameters of one function."""

    parameters: tuple[Parameter, ...]
    takes_any: bool
    """Whether it has ``*args`` or ``**kwargs``."""
    node: Node
    """The ``def`` node."""

    @property
    def names(self) -> frozenset[str]:
        """Names of the parameters."""
        return frozenset(parameter.name for parameter in self.parameters)


def signature_of(text: bytes, target: Target) -> Signature | None:
    """Signature of the function, method or the module's ``forward``; None if the file does not define it."""
    by_name = {item.target.qualname: item for item in definitions(text, target.path)}
    if target.kind is TargetKind.MODULE:
        return _method(by_name, target.qualname, "forward")
    definition = by_name.get(target.qualname)
    if definition is None:
        return None
    return _signature(definition.node, is_method=target.kind is TargetKind.METHOD or is_class_method(definition.node))


def constructor_of(text: bytes, target: Target) -> Signature | None:
    """Signature of ``__init__`` in the target's class or its bases; None if the file does not define it."""
    by_name = {item.target.qualname: item for item in definitions(text, target.path)}
    return _method(by_name, target.class_name, "__init__") if target.class_name else None


def _method(by_name: dict[str, Definition], class_name: str, name: str) -> Signature | None:
    """A method of a class or of its bases in the same file."""
    pending, visited = [class_name], set()
    while pending:
        current = pending.pop(0)
        visited.add(current)
        definition = by_name.get(f"{current}.{name}")
        if definition is not None:
            return _signature(definition.node, is_method=True)
        if current in by_name:
            pending += [base for base in bases_of(by_name[current].node) if base not in visited]
    return None


def _signature(node: Node, *, is_method: bool) -> Signature:
    parameters = field(node, "parameters")
    children = parameters.named_children if parameters is not None else []
    parsed = [parameter for child in children if (parameter := _parameter(child))]
    return Signature(tuple(parsed[1:] if is_method else parsed), any(item.further for item in parsed), node)


FURTHER = {"list_splat_pattern": ContainerKind.POSITIONAL, "dictionary_splat_pattern": ContainerKind.KEYWORDS}
"""Syntax of ``*args`` and ``**kwargs``."""


def _parameter(node: Node) -> Parameter | None:
    pattern = node.named_children[0] if node.type == "typed_parameter" else node
    if pattern.type in FURTHER and pattern.named_children:
        further = text_of(pattern.named_children[0])
        return Parameter(further, text_of(field(node, "type")), True, line_of(node), further=FURTHER[pattern.type])
    if node.type not in ("identifier", "typed_parameter", "default_parameter", "typed_default_parameter"):
        return None
    name = node if node.type == "identifier" else field(node, "name")
    if node.type == "typed_parameter":
        name = node.named_children[0]
    if name is None or name.type != "identifier":
        return None
    default = text_of(field(node, "value"))
    return Parameter(text_of(name), text_of(field(node, "type")), "default" in node.type, line_of(node), default)
