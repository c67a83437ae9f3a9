"""Parameters of functions and constructors, read from the source."""

from __future__ import annotations

from dataclasses import dataclass

from tree_sitter import Node

from mtmc_lsp.core.errors import RequestError
from mtmc_lsp.core.workload import Target, TargetKind
from mtmc_lsp.source.syntax import field, line_of, text_of
from mtmc_lsp.source.targets import find_definition


@dataclass(frozen=True)
class Parameter:
    """One parameter; ``self``, ``*args`` and ``**kwargs`` are left out."""

    name: str
    annotation: str
    """As written; empty where there is none."""
    has_default: bool
    line: int


def parameters_of(text: bytes, target: Target) -> list[Parameter]:
    """Parameters of what runs: the function, the method, or the module's ``forward``."""
    name = f"{target.qualname}.forward" if target.kind is TargetKind.MODULE else target.qualname
    return _parameters(text, target.path, name, is_method=target.kind in (TargetKind.MODULE, TargetKind.METHOD))


def constructor_parameters(text: bytes, target: Target) -> list[Parameter]:
    """Parameters of the class's ``__init__``; none where it has none of its own."""
    return _parameters(text, target.path, f"{target.class_name}.__init__", is_method=True)


def _parameters(text: bytes, path: str, qualname: str, *, is_method: bool) -> list[Parameter]:
    try:
        node = find_definition(text, path, qualname).node
    except RequestError:
        return []
    parameters = field(node, "parameters")
    found = [p for child in (parameters.named_children if parameters else []) if (p := _parameter(child))]
    return found[1:] if is_method else found


def _parameter(node: Node) -> Parameter | None:
    kinds = {"identifier", "typed_parameter", "default_parameter", "typed_default_parameter"}
    if node.type not in kinds:
        return None
    name = node if node.type == "identifier" else field(node, "name")
    if node.type == "typed_parameter":
        name = node.named_children[0]
    if name is None or name.type != "identifier":
        return None
    annotation = field(node, "type")
    return Parameter(text_of(name), text_of(annotation) if annotation else "", "default" in node.type, line_of(node))
