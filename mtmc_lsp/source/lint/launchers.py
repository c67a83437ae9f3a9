"""The Python functions around kernels, as the checks look at them: which launch something, and which names are tensors."""

from __future__ import annotations

from collections.abc import Iterator

from tree_sitter import Node

from mtmc_lsp.source.lint.finding import Context
from mtmc_lsp.source.lint.kernel import above
from mtmc_lsp.source.syntax import field, text_of, walk

TENSOR_USES = frozenset("shape numel size stride dtype device is_cuda ndim element_size data_ptr".split())
"""Attributes that show a name to be a tensor."""


def functions(root: Node) -> Iterator[Node]:
    """Every function of a statement, those inside others too."""
    return (node for node in walk(root) if node.type == "function_definition")


def own(function: Node) -> Iterator[Node]:
    """The nodes of a function that are not in a function inside it."""
    for node in walk(function):
        if next(above(node, "function_definition", function), None) is None:
            yield node


def is_forward(function: Node) -> bool:
    """Whether it is a module's ``forward``."""
    parameters = text_of(field(function, "parameters"))
    return text_of(field(function, "name")) == "forward" and parameters.startswith("(self")


def launches(function: Node, context: Context) -> list[Node]:
    """Calls ``kernel[grid](...)`` of the file's own kernels in a function."""
    launches = []
    for node in own(function):
        called = field(node, "function") if node.type == "call" else None
        if called is not None and called.type == "subscript" and text_of(field(called, "value")) in context.kernels:
            launches.append(node)
    return launches


def tensor_parameters(function: Node) -> set[str]:
    """Parameters that the function itself uses as tensors or declares to be."""
    listed = field(function, "parameters")
    names = {}
    for item in listed.named_children if listed is not None else ():
        name = item if item.type == "identifier" else field(item, "name") or (item.named_children or [item])[0]
        names[text_of(name)] = text_of(field(item, "type"))
    changed = {text_of(field(n, "left")) for n in walk(function) if n.type == "assignment"}
    tensors = {name for name, kind in names.items() if kind.rpartition(".")[2] == "Tensor"}
    for node in walk(function):
        if node.type == "attribute" and text_of(field(node, "attribute")) in TENSOR_USES:
            tensors.add(text_of(field(node, "object")))
    return (tensors & names.keys()) - changed - {"self", "ctx"}
