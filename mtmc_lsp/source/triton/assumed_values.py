"""Usual values for compile-time constants of a kernel that its file does not tell, by how the kernel uses them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tree_sitter import Node

from mtmc_lsp.core.run import DTYPE
from mtmc_lsp.source.lint.kernel import Kernel
from mtmc_lsp.source.syntax import field, text_of, walk

SHAPES = ("arange", "zeros", "full", "make_block_ptr", "make_tensor_descriptor", "reshape", "view", "broadcast_to")
"""Functions whose arguments are sizes of blocks."""
BLOCK, SMALL_BLOCK, COUNT = 64, 32, 4
MOST_LARGE_BLOCKS = 3
"""With more parameters that are sizes of blocks, they are small: a tile may have several dimensions."""
CONDITIONS = ("if_statement", "elif_clause", "while_statement")
DTYPES = ("dtype", "out_dtype")
FACTOR = re.compile(r"eps|scale|alpha|beta|smooth|cap(ping)?$", re.IGNORECASE)
"""Names of numbers that are no counts."""


def assumed_values(kernel: Kernel) -> dict[str, object]:
    """A value for each compile-time constant: no option, blocks of a power of two, the text or dtype that it is used as."""
    uses: dict[str, list[Node]] = {name: [] for name, item in kernel.parameters.items() if item.is_constexpr}
    for node in walk(kernel.body):
        if node.type == "identifier" and text_of(node) in uses and not _is_label(node):
            uses[text_of(node)].append(node)
    sizes = [name for name, nodes in uses.items() if any(_is_size(kernel, node) for node in nodes)]
    block = BLOCK if len(sizes) <= MOST_LARGE_BLOCKS else SMALL_BLOCK
    return {name: _value(kernel, name, nodes, block if name in sizes else COUNT) for name, nodes in uses.items()}


def _value(kernel: Kernel, name: str, nodes: list[Node], number: int) -> object:
    texts = [text for node in nodes for text in _compared(node)]
    if texts:
        return texts[0]
    if "dtype" in name.lower() or any(_is_dtype(kernel, node) for node in nodes):
        return f"{DTYPE}fp32"
    if number == COUNT and nodes and all(_is_condition(node) for node in nodes):
        return False
    return 1.0 if FACTOR.search(name) else number


def _is_label(node: Node) -> bool:
    parent = node.parent
    if parent is None:
        return False
    return (parent.type == "keyword_argument" and field(parent, "name") == node) or (
        parent.type == "attribute" and field(parent, "attribute") == node
    )


def _is_size(kernel: Kernel, node: Node) -> bool:
    """Whether a use is part of the shape of a block."""
    call = _call_around(node)
    while call is not None:
        function = field(call, "function")
        if (kernel.triton_name(function) or text_of(function).rpartition(".")[2]) in SHAPES:
            return True
        call = _call_around(call)
    return False


def _call_around(node: Node) -> Node | None:
    """The call whose arguments contain a node."""
    inner = node.parent
    while inner is not None and inner.type not in ("argument_list", "block"):
        inner = inner.parent
    return inner.parent if inner is not None and inner.type == "argument_list" else None


def _is_dtype(kernel: Kernel, node: Node) -> bool:
    """Whether a use is ``dtype=NAME`` or ``x.to(NAME)``."""
    parent = node.parent
    if parent is not None and parent.type == "keyword_argument":
        return text_of(field(parent, "name")) in DTYPES
    call = parent.parent if parent is not None and parent.type == "argument_list" else None
    function = field(call, "function")
    is_method = function is not None and function.type == "attribute" and not kernel.triton_name(function)
    return is_method and text_of(field(function, "attribute")) == "to"


def _compared(node: Node) -> Iterator[str]:
    """The texts that a use compares with."""
    parent = node.parent
    if parent is not None and parent.type == "comparison_operator":
        for item in parent.named_children:
            if item.type == "string":
                yield str(ast.literal_eval(text_of(item)))


def _is_condition(node: Node) -> bool:
    """Whether a use is a truth value: ``if NAME``, ``not NAME``, ``NAME and x``, ``a if NAME else b``."""
    parent = node.parent
    while parent is not None and parent.type == "parenthesized_expression":
        node, parent = parent, parent.parent
    if parent is None:
        return False
    if parent.type in ("boolean_operator", "not_operator"):
        return True
    if parent.type == "conditional_expression":
        return parent.named_children[1] == node
    return parent.type in CONDITIONS and field(parent, "condition") == node
