"""Checks of types: operands of matrix products, and sums in too few bits."""

from __future__ import annotations

from collections.abc import Iterator

from tree_sitter import Node

from mtmc_lsp.source.lint.finding import Finding, Severity, found
from mtmc_lsp.source.lint.kernel import Kernel, above, argument
from mtmc_lsp.source.syntax import field, text_of, walk

LEAST = 16
"""Sizes of a tensor core's operands are at least this."""
SMALL_FLOATS = ("float16", "bfloat16", "float8e5", "float8e4nv")
SIZED = {"zeros": (1, "dtype"), "full": (2, "dtype")}
"""Functions that make a block, with the place of its type."""


def dot_operands(kernel: Kernel) -> Iterator[Finding]:
    """``tl.dot`` of operands that have different types, or a size below 16."""
    for name, call in kernel.calls:
        if name != "dot":
            continue
        left, right = argument(call, 0, "input"), argument(call, 1, "other")
        if left is None or right is None:
            continue
        types = (_dtype(kernel, left), _dtype(kernel, right))
        # Two kinds of float8 may be multiplied with each other.
        if all(types) and types[0] != types[1] and not all("float8" in kind for kind in types):
            message = f"the operands are {types[0]} and {types[1]}; give both one type"
            yield found("dot-operands", Severity.ERROR, call, message)
        for operand in (left, right):
            size = _small_size(kernel, operand)
            if size is not None:
                message = f"`{text_of(operand)}` has a size of {size}, and tensor cores take {LEAST} at least; pad it"
                yield found("dot-operands", Severity.ERROR, call, message)


def _dtype(kernel: Kernel, node: Node, depth: int = 6) -> str:
    """The type of a block where it is written down; empty where it is not."""
    if depth == 0:
        return ""
    if node.type == "identifier":
        values = kernel.values.get(text_of(node), ())
        found_types = {_dtype(kernel, value, depth - 1) for value in values}
        return found_types.pop() if len(found_types) == 1 else ""
    if node.type != "call":
        return ""
    function = field(node, "function")
    name = kernel.triton_name(function)
    if name in SIZED:
        return _written(kernel, argument(node, *SIZED[name]))
    if name == "trans":
        inner = argument(node, 0, "input")
        return _dtype(kernel, inner, depth - 1) if inner is not None else ""
    if function is not None and function.type == "attribute" and text_of(field(function, "attribute")) == "to":
        return _written(kernel, argument(node, 0, "dtype"))
    return ""


def _written(kernel: Kernel, node: Node | None) -> str:
    """``float16`` for ``tl.float16``."""
    return kernel.triton_name(node) if node is not None else ""


def _small_size(kernel: Kernel, node: Node) -> int | None:
    """A size below 16 of a block whose shape is written in numbers."""
    if node.type == "identifier":
        values = kernel.values.get(text_of(node), ())
        return _small_size(kernel, values[0]) if len(values) == 1 and values[0].type == "call" else None
    name = kernel.triton_name(field(node, "function")) if node.type == "call" else ""
    shape = argument(node, *((0, "shape"))) if name in SIZED else None
    if shape is None or shape.type not in ("tuple", "list"):
        return None
    sizes = [int(text_of(item), 0) for item in shape.named_children if item.type == "integer"]
    return next((size for size in sizes if size < LEAST), None) if len(shape.named_children) == 2 else None


def low_precision_accumulator(kernel: Kernel) -> Iterator[Finding]:
    """A sum over a loop that is kept in 16 bits or fewer."""
    reported: set[str] = set()
    for node in walk(kernel.body):
        left = field(node, "left") if node.type in ("augmented_assignment", "assignment") else None
        name = text_of(left)
        if left is None or left.type != "identifier" or name in reported or not _adds(kernel, node, name):
            continue
        if not any(True for kind in ("for_statement", "while_statement") for _ in above(node, kind, kernel.body)):
            continue
        for value in kernel.values.get(name, ()):
            call = kernel.triton_name(field(value, "function")) if value.type == "call" else ""
            kind = _written(kernel, argument(value, *SIZED[call])) if call in SIZED else ""
            if kind in SMALL_FLOATS:
                reported.add(name)
                message = f"`{name}` adds up in {kind} over a loop, which loses bits; add in tl.float32, and narrow the result"
                yield found("low-precision-accumulator", Severity.WARNING, value, message)


def _adds(kernel: Kernel, node: Node, name: str) -> bool:
    """``name += ...``, ``name = name + ...`` or ``name = tl.dot(a, b, name)``."""
    right = field(node, "right")
    if node.type == "augmented_assignment":
        return text_of(field(node, "operator")) == "+="
    if right is None:
        return False
    if right.type == "binary_operator" and text_of(field(right, "operator")) == "+":
        return name in (text_of(field(right, "left")), text_of(field(right, "right")))
    is_dot = right.type == "call" and kernel.triton_name(field(right, "function")) == "dot"
    return is_dot and text_of(argument(right, 2, "acc")) == name
