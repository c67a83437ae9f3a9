"""Waiting for the GPU inside a launcher or a ``forward``: by a method, by a number made of a tensor, by printing one."""

from __future__ import annotations

from collections.abc import Iterator

from tree_sitter import Node

from mtmc_lsp.source.lint.finding import Context, Finding, Severity, found
from mtmc_lsp.source.lint.kernel import above
from mtmc_lsp.source.lint.launchers import functions, is_forward, launches, own, tensor_parameters
from mtmc_lsp.source.syntax import field, text_of, walk

METHODS = {"item": ".item()", "cpu": ".cpu()", "tolist": ".tolist()", "numpy": ".numpy()"}
"""Methods of tensors that wait for the GPU."""
NUMBERS = frozenset(("float", "int", "bool"))
"""Functions that make a number of a tensor."""
ABOUT = frozenset(
    "size dim numel stride item tolist numpy cpu element_size data_ptr storage_offset get_device is_contiguous "
    "is_floating_point is_complex type nelement ndimension untyped_storage".split()
)
"""Methods of tensors that say something of them, or give what is no tensor on the GPU any more."""
MAKERS = frozenset(
    "empty zeros ones full rand randn randint arange linspace empty_like zeros_like ones_like full_like rand_like randn_like "
    "empty_strided".split()
)
"""Functions of ``torch`` that give a tensor whatever they get."""
DELIBERATE = ("debug", "verbose", "DEBUG", "VERBOSE")
"""Words of a condition under which somebody wants to wait."""
DEPTH = 6


def host_sync(root: Node, context: Context) -> Iterator[Finding]:
    """Waiting for the GPU inside a launcher or a ``forward``."""
    for function in functions(root):
        where = "a launcher" if launches(function, context) else "forward" if is_forward(function) else ""
        if not where:
            continue
        tensors = _tensors(function)
        for node in own(function):
            said = _sync(node, tensors) if node.type == "call" else ""
            if said and not _is_deliberate(node, function):
                message = f"{said} inside {where} waits for the GPU to finish, and leaves it idle after that"
                yield found("host-sync", Severity.HINT, node, message)


def _sync(call: Node, tensors: frozenset[str]) -> str:
    """What waits, in words; empty where nothing does."""
    function, arguments = field(call, "function"), field(call, "arguments")
    given = arguments.named_children if arguments is not None else []
    if function is None:
        return ""
    name = text_of(function)
    if name == "torch.cuda.synchronize":
        return "torch.cuda.synchronize()"
    if name == "print" and any(_is_shown(item, tensors) for item in given):
        return "printing a tensor"
    if name in NUMBERS and len(given) == 1 and _is_tensor(given[0], tensors):
        return f"{name}() of a tensor"
    if function.type != "attribute":
        return ""
    owner, name = field(function, "object"), text_of(field(function, "attribute"))
    if name == "to" and given and text_of(given[0]).strip("\"'") == "cpu":
        return '.to("cpu")'
    # `self.x.cpu()` of a module moves the module; a plain name may be anything, but only tensors have these four.
    is_shape = owner is not None and any(word in text_of(owner) for word in (".shape", ".size(", ".stride("))
    return METHODS.get(name, "") if not given and not is_shape else ""


def _is_deliberate(node: Node, function: Node) -> bool:
    conditions = (text_of(field(item, "condition")) for item in above(node, "if_statement", function))
    return any(word in condition for condition in conditions for word in DELIBERATE)


def _is_shown(node: Node, tensors: frozenset[str]) -> bool:
    """Whether an argument of ``print`` is a tensor, or a string with one in it."""
    if node.type != "string":
        return _is_tensor(node, tensors)
    parts = (item for item in walk(node) if item.type == "interpolation")
    return any(_is_tensor(value, tensors) for part in parts if (value := field(part, "expression")) is not None)


def _tensors(function: Node) -> frozenset[str]:
    """Names that surely hold tensors: parameters used as such, and what is only ever assigned such."""
    known = frozenset(tensor_parameters(function))
    values: dict[str, list[Node]] = {}
    for node in own(function):
        left, right = field(node, "left"), field(node, "right")
        if node.type == "assignment" and left is not None and right is not None:
            for name in [left] if left.type == "identifier" else [i for i in walk(left) if i.type == "identifier"]:
                # Of `a, b = f()` it is not known what either is.
                values.setdefault(text_of(name), []).append(right if name == left else left)
    for word, assigned in values.items():
        if all(_is_tensor(value, known) for value in assigned):
            known |= {word}
    return known


def _is_tensor(node: Node, tensors: frozenset[str], depth: int = DEPTH) -> bool:
    """Whether an expression is surely a tensor."""
    if depth == 0:
        return False
    kind = node.type
    if kind == "identifier":
        return text_of(node) in tensors
    if kind == "parenthesized_expression":
        return any(_is_tensor(child, tensors, depth - 1) for child in node.named_children)
    if kind == "subscript":
        value = field(node, "value")
        return value is not None and _is_tensor(value, tensors, depth - 1)
    if kind in ("binary_operator", "unary_operator", "comparison_operator"):
        return any(_is_tensor(child, tensors, depth - 1) for child in node.named_children)
    return kind == "call" and _gives_tensor(node, tensors, depth)


def _gives_tensor(call: Node, tensors: frozenset[str], depth: int) -> bool:
    function, arguments = field(call, "function"), field(call, "arguments")
    if function is None or function.type != "attribute":
        return False
    owner, name = field(function, "object"), text_of(field(function, "attribute"))
    if text_of(owner) == "torch":
        given = arguments.named_children if arguments is not None else []
        is_of_tensor = bool(given) and not name.startswith("is_") and _is_tensor(given[0], tensors, depth - 1)
        return name in MAKERS or is_of_tensor
    return owner is not None and name not in ABOUT and _is_tensor(owner, tensors, depth - 1)
