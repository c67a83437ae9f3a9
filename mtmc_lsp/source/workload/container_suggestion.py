"""Suggest a value for a parameter that is a container of tensors, based on its annotation and on the code that takes it apart."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tree_sitter import Node

from mtmc_lsp.source.syntax import field, parse_with_recovery, text_of, walk
from mtmc_lsp.source.workload.signatures import Parameter, Signature
from mtmc_lsp.source.workload.value_syntax import split_at

TENSOR = "f32[64,1024]"
TENSOR_CLASSES = frozenset({"Tensor", "torch.Tensor", "Parameter"})
TUPLE = re.compile(r"(?:typing\.)?[Tt]uple\[(.*)\]", re.DOTALL)
NUMBERS = {"int": "1", "float": "1.0", "bool": "True"}


def suggested_container(parameter: Parameter, signature: Signature, text: bytes) -> str:
    """A container of tensors in a directive's syntax; empty if nothing tells that the parameter is one."""
    annotation = parameter.annotation.strip("\"'")
    match = TUPLE.fullmatch(annotation)
    items = split_at(match[1], ",") if match is not None else []
    if items and set(items) <= TENSOR_CLASSES:
        return _tuple(len(items))
    record = suggested_record(annotation, text)
    if record and not record.endswith("()"):
        return record
    if annotation in TENSOR_CLASSES:
        return ""
    keys = dict.fromkeys(_keys(parameter.name, signature.node))
    if keys:
        return "{" + ",".join(f'"{key}":{TENSOR}' for key in keys) + "}"
    count = next(_unpacked(parameter.name, signature.node), 0)
    return _tuple(count) if count > 1 else ""


def suggested_record(annotation: str, text: bytes) -> str:
    """A call of the dataclass or the named tuple of this name in the file; empty if there is none."""
    fields = _fields(annotation, text) if annotation.isidentifier() else None
    return "" if fields is None else f"{annotation}({','.join(f'{name}={value}' for name, value in fields)})"


def _tuple(count: int) -> str:
    return f"({','.join([TENSOR] * count)}{',' if count == 1 else ''})"


def _fields(name: str, text: bytes) -> list[tuple[str, str]] | None:
    """The fields without default of a dataclass or a named tuple in this file, with a value for each; ``None`` for others."""
    root, _ = parse_with_recovery(text)
    for node in walk(root):
        if node.type != "class_definition" or text_of(field(node, "name")) != name:
            continue
        decorators = (
            text_of(node.parent) if node.parent is not None and node.parent.type == "decorated_definition" else ""
        )
        is_dataclass = re.match(r"@(?:dataclasses\.)?dataclass\b", decorators) is not None
        if is_dataclass or "NamedTuple" in text_of(field(node, "superclasses")):
            return list(_required(field(node, "body")))
        return None
    return None


def _required(body: Node | None) -> Iterator[tuple[str, str]]:
    """The annotated names in a class that have no value, with an example for each."""
    for statement in body.named_children if body is not None else []:
        assignment = statement.named_children[0] if statement.named_children else statement
        annotation = text_of(field(assignment, "type"))
        if assignment.type == "assignment" and annotation and field(assignment, "right") is None:
            value = TENSOR if annotation in TENSOR_CLASSES else NUMBERS.get(annotation, "None")
            yield text_of(field(assignment, "left")), value


def _keys(name: str, function: Node) -> Iterator[str]:
    """The strings that index the parameter, as in ``batch["mask"]``."""
    for node in walk(function):
        if node.type == "subscript" and text_of(field(node, "value")) == name:
            key = field(node, "subscript")
            if key is not None and key.type == "string":
                yield text_of(key).strip("\"'")


def _unpacked(name: str, function: Node) -> Iterator[int]:
    """The number of variables in each assignment such as ``cos, sin = position_embeddings``."""
    for node in walk(function):
        left = field(node, "left") if node.type == "assignment" else None
        if left is not None and left.type == "pattern_list" and text_of(field(node, "right")) == name:
            yield len(left.named_children)
