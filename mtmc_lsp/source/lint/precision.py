"""Checks of dtypes: operands of ``tl.dot`` and accumulators in low precision."""

from __future__ import annotations

from collections.abc import Iterator

from tree_sitter import Node

from mtmc_lsp.source.lint.finding import Finding, Severity, finding_at
from mtmc_lsp.source.lint.kernel import Kernel, argument
from mtmc_lsp.source.syntax import field, text_of, walk

MIN_INNER_SIZE = 16
"""Least inner size of a product. Triton pads small numbers of rows and columns."""
MIN_INNER_SIZES = {"float32": 8, "float64": 4}
"""The same for wide types, in the newest Triton."""
SMALL_FLOATS = ("float16", "bfloat16", "float8e5", "float8e4nv")
SHAPED_CONSTRUCTORS = {"zeros": (1, "dtype"), "full": (2, "dtype")}
"""Functions that create a block, with position and keyword of the dtype argument."""


def dot_operands(kernel: Kernel) -> Iterator[Finding]:
    """``tl.dot`` with operands of different dtypes or with an inner size below 16."""
    known: dict[tuple[str, int], str] = {}
    for name, call in kernel.calls:
        if name != "dot":
            continue
        left, right = argument(call, 0, "input"), argument(call, 1, "other")
        if left is None or right is None:
            continue
        types = (_dtype(kernel, left, known), _dtype(kernel, right, known))
        # Different float8 dtypes may be multiplied with each other.
        if all(types) and types[0] != types[1] and not all("float8" in kind for kind in types):
            message = f"the operands are {types[0]} and {types[1]}; convert one so that both have the same type"
            yield finding_at("dot-operands", Severity.ERROR, call, message)
        least = min(MIN_INNER_SIZES.get(kind, MIN_INNER_SIZE) for kind in types)
        for operand, axis in ((left, 1), (right, 0)):
            size = _literal_size(kernel, operand, axis)
            if size is not None and size < least:
                message = f"`{text_of(operand)}` has inner size {size}, but a product needs at least {least}; pad it"
                yield finding_at("dot-operands", Severity.ERROR, call, message)


def _dtype(kernel: Kernel, node: Node, known: dict[tuple[str, int], str], depth: int = 6) -> str:
    """The explicit dtype of a block; empty if unknown. ``known`` caches the dtypes of names."""
    if depth == 0:
        return ""
    if node.type == "identifier":
        key = (text_of(node), depth)
        if key not in known:
            types = {_dtype(kernel, value, known, depth - 1) for value in kernel.values.get(key[0], ())}
            known[key] = types.pop() if len(types) == 1 else ""
        return known[key]
    if node.type != "call":
        return ""
    function = field(node, "function")
    name = kernel.triton_name(function)
    if name in SHAPED_CONSTRUCTORS:
        return _dtype_name(kernel, argument(node, *SHAPED_CONSTRUCTORS[name]))
    if name == "trans":
        inner = argument(node, 0, "input")
        return _dtype(kernel, inner, known, depth - 1) if inner is not None else ""
    if function is not None and function.type == "attribute" and text_of(field(function, "attribute")) == "to":
        return _dtype_name(kernel, argument(node, 0, "dtype"))
    return ""


def _dtype_name(kernel: Kernel, node: Node | None) -> str:
    """``float16`` for ``tl.float16``."""
    return kernel.triton_name(node) if node is not None else ""


def _literal_size(kernel: Kernel, node: Node, axis: int) -> int | None:
    """The size of a block of two axes along one of them, if its shape has a number there."""
    if node.type == "identifier":
        values = kernel.values.get(text_of(node), ())
        return _literal_size(kernel, values[0], axis) if len(values) == 1 and values[0].type == "call" else None
    name = kernel.triton_name(field(node, "function")) if node.type == "call" else ""
    shape = argument(node, *((0, "shape"))) if name in SHAPED_CONSTRUCTORS else None
    if shape is None or shape.type not in ("tuple", "list") or len(shape.named_children) != 2:
        return None
    size = shape.named_children[axis]
    return int(text_of(size), 0) if size.type == "integer" else None


def low_precision_accumulator(kernel: Kernel) -> Iterator[Finding]:
    """A sum over a loop that is accumulated in 16 bits or fewer."""
    accumulated: set[str] = set()
    for node in walk(kernel.body):
        left = field(node, "left") if node.type in ("augmented_assignment", "assignment") else None
        name = text_of(left)
        if left is None or left.type != "identifier" or name in accumulated or not _accumulates(kernel, node, name):
            continue
        if not any(True for _ in kernel.enclosing.ancestors(node, "for_statement", "while_statement")):
            continue
        accumulated.add(name)
        for value in kernel.values.get(name, ()):
            call = kernel.triton_name(field(value, "function")) if value.type == "call" else ""
            kind = (
                _dtype_name(kernel, argument(value, *SHAPED_CONSTRUCTORS[call])) if call in SHAPED_CONSTRUCTORS else ""
            )
            if kind in SMALL_FLOATS:
                message = f"`{name}` accumulates in {kind} over a loop and loses precision; use tl.float32 and convert the result"
                yield finding_at("low-precision-accumulator", Severity.WARNING, value, message)


def _accumulates(kernel: Kernel, node: Node, name: str) -> bool:
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
