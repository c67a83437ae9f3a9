"""Analysis of the Python functions around kernels: launches, and which names hold tensors."""

from __future__ import annotations

from collections.abc import Iterator

from tree_sitter import Node

from mtmc_lsp.source.lint.finding import Context
from mtmc_lsp.source.syntax import field, text_of, walk

TENSOR_USES = frozenset("shape numel size stride dtype device is_cuda ndim element_size data_ptr".split())
"""Attributes that only tensors have."""


def functions(root: Node) -> Iterator[Node]:
    """Every function in a statement, including nested functions."""
    return (node for node in walk(root) if node.type == "function_definition")


def direct_nodes(function: Node) -> Iterator[Node]:
    """The nodes of a function, without those of nested functions."""
    pending = [function]
    while pending:
        node = pending.pop()
        yield node
        if node.type != "function_definition" or node == function:
            pending.extend(reversed(node.children))


def is_forward(function: Node) -> bool:
    """Whether the function is a module's ``forward``."""
    parameters = text_of(field(function, "parameters"))
    return text_of(field(function, "name")) == "forward" and parameters.startswith("(self")


def launches(function: Node, context: Context) -> list[Node]:
    """Launches ``kernel[grid](...)`` of kernels from the same file."""
    launches = []
    for node in direct_nodes(function):
        callee = field(node, "function") if node.type == "call" else None
        if callee is not None and callee.type == "subscript" and text_of(field(callee, "value")) in context.kernels:
            launches.append(node)
    return launches


def tensor_parameters(function: Node) -> set[str]:
    """Parameters that are annotated or used as tensors."""
    parameter_list = field(function, "parameters")
    names = {}
    for item in parameter_list.named_children if parameter_list is not None else ():
        name = item if item.type == "identifier" else field(item, "name") or (item.named_children or [item])[0]
        names[text_of(name)] = text_of(field(item, "type"))
    reassigned = {text_of(field(n, "left")) for n in walk(function) if n.type == "assignment"}
    tensors = {name for name, kind in names.items() if kind.rpartition(".")[2] == "Tensor"}
    for node in walk(function):
        if node.type == "attribute" and text_of(field(node, "attribute")) in TENSOR_USES:
            tensors.add(text_of(field(node, "object")))
    return (tensors & names.keys()) - reassigned - {"self", "ctx"}
