"""Check for host synchronisation in a launcher or ``forward``: by a method, by conversion to a scalar, or by printing."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet

from tree_sitter import Node

from mtmc_lsp.source.lint.finding import Context, Finding, Severity, finding_at
from mtmc_lsp.source.lint.kernel import Enclosing
from mtmc_lsp.source.lint.launchers import direct_nodes, functions, is_forward, launches, tensor_parameters
from mtmc_lsp.source.syntax import field, text_of, walk

SYNC_METHODS = {"item": ".item()", "cpu": ".cpu()", "tolist": ".tolist()", "numpy": ".numpy()"}
"""Tensor methods that synchronise with the GPU."""
SCALAR_CONVERSIONS = frozenset(("float", "int", "bool"))
"""Functions that convert a tensor to a scalar."""
NON_TENSOR_METHODS = frozenset(
    "size dim numel stride item tolist numpy cpu element_size data_ptr storage_offset get_device is_contiguous "
    "is_floating_point is_complex type nelement ndimension untyped_storage".split()
)
"""Tensor methods that return metadata or something other than a GPU tensor."""
TENSOR_CONSTRUCTORS = frozenset(
    "empty zeros ones full rand randn randint arange linspace empty_like zeros_like ones_like full_like rand_like randn_like "
    "empty_strided".split()
)
"""Functions of ``torch`` that always return a tensor."""
DEBUG_NAMES = ("debug", "verbose", "DEBUG", "VERBOSE")
"""Names in a condition that indicate deliberate synchronisation."""
MAX_DEPTH = 6


def host_sync(root: Node, context: Context) -> Iterator[Finding]:
    """Host synchronisation in a launcher or ``forward``."""
    for function in functions(root):
        where = "a launcher" if launches(function, context) else "forward" if is_forward(function) else ""
        if not where:
            continue
        tensors, enclosing = _tensors(function), Enclosing(function)
        for node in direct_nodes(function):
            sync = _sync(node, tensors) if node.type == "call" else ""
            if sync and not _is_deliberate(node, enclosing):
                message = f"{sync} inside {where} waits for the GPU and leaves it idle afterwards"
                yield finding_at("host-sync", Severity.HINT, node, message)


def _sync(call: Node, tensors: AbstractSet[str]) -> str:
    """Description of the synchronising call; empty if the call does not synchronise."""
    function, arguments = field(call, "function"), field(call, "arguments")
    argument_nodes = arguments.named_children if arguments is not None else []
    if function is None:
        return ""
    name = text_of(function)
    if name == "torch.cuda.synchronize":
        return "torch.cuda.synchronize()"
    if name == "print" and any(_prints_tensor(item, tensors) for item in argument_nodes):
        return "printing a tensor"
    if name in SCALAR_CONVERSIONS and len(argument_nodes) == 1 and _is_tensor(argument_nodes[0], tensors):
        return f"{name}() of a tensor"
    if function.type != "attribute":
        return ""
    owner, name = field(function, "object"), text_of(field(function, "attribute"))
    if name == "to" and argument_nodes and text_of(argument_nodes[0]).strip("\"'") == "cpu":
        return '.to("cpu")'
    # `module.x.cpu()` has the same form but moves a module. Only tensors have all four methods.
    is_shape = owner is not None and any(word in text_of(owner) for word in (".shape", ".size(", ".stride("))
    return SYNC_METHODS.get(name, "") if not argument_nodes and not is_shape else ""


def _is_deliberate(node: Node, enclosing: Enclosing) -> bool:
    conditions = (text_of(field(item, "condition")) for item in enclosing.ancestors(node, "if_statement"))
    return any(word in condition for condition in conditions for word in DEBUG_NAMES)


def _prints_tensor(node: Node, tensors: AbstractSet[str]) -> bool:
    """Whether an argument of ``print`` is a tensor or an f-string that contains one."""
    if node.type != "string":
        return _is_tensor(node, tensors)
    parts = (item for item in walk(node) if item.type == "interpolation")
    return any(_is_tensor(value, tensors) for part in parts if (value := field(part, "expression")) is not None)


def _tensors(function: Node) -> frozenset[str]:
    """Names that certainly hold tensors: parameters used as tensors, and names to which only tensors are assigned."""
    known = tensor_parameters(function)
    values: dict[str, list[Node]] = {}
    for node in direct_nodes(function):
        left, right = field(node, "left"), field(node, "right")
        if node.type == "assignment" and left is not None and right is not None:
            for target in [left] if left.type == "identifier" else [i for i in walk(left) if i.type == "identifier"]:
                # In `a, b = f()`, neither value is known.
                values.setdefault(text_of(target), []).append(right if target == left else left)
    for name, assigned in values.items():
        if all(_is_tensor(value, known) for value in assigned):
            known.add(name)
    return frozenset(known)


def _is_tensor(node: Node, tensors: AbstractSet[str], depth: int = MAX_DEPTH) -> bool:
    """Whether an expression is certainly a tensor."""
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
    return kind == "call" and _returns_tensor(node, tensors, depth)


def _returns_tensor(call: Node, tensors: AbstractSet[str], depth: int) -> bool:
    function, arguments = field(call, "function"), field(call, "arguments")
    if function is None or function.type != "attribute":
        return False
    owner, name = field(function, "object"), text_of(field(function, "attribute"))
    if text_of(owner) == "torch":
        argument_nodes = arguments.named_children if arguments is not None else []
        is_of_tensor = (
            bool(argument_nodes) and not name.startswith("is_") and _is_tensor(argument_nodes[0], tensors, depth - 1)
        )
        return name in TENSOR_CONSTRUCTORS or is_of_tensor
    return owner is not None and name not in NON_TENSOR_METHODS and _is_tensor(owner, tensors, depth - 1)
