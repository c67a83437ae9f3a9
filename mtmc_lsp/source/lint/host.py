"""Checks of the Python code around kernels: launchers and ``forward`` methods."""

from __future__ import annotations

from collections.abc import Iterator

from tree_sitter import Node

from mtmc_lsp.source.lint.finding import Context, Finding, Severity, finding_at
from mtmc_lsp.source.lint.launchers import direct_nodes, functions, is_forward, launches, tensor_parameters
from mtmc_lsp.source.syntax import field, text_of, walk

LAYOUT_WORDS = ("stride", "reshape", "view", "flatten", "ravel", "TensorDescriptor")
"""Words that indicate that a launcher handles the memory layout."""


def assumed_contiguous(root: Node, context: Context) -> Iterator[Finding]:
    """A launcher passes a tensor parameter to a kernel without any information about its memory layout."""
    if context.mentions_layout:
        return
    for function in functions(root):
        tensors = tensor_parameters(function)
        # Functions called in this file may receive tensors that their caller made contiguous.
        is_called_in_file = text_of(field(function, "name")) in context.called
        if is_called_in_file or not tensors or any(word in text_of(function) for word in LAYOUT_WORDS):
            continue
        for launch in launches(function, context):
            arguments = field(launch, "arguments")
            argument_nodes = arguments.named_children if arguments is not None else []
            passed = [node for node in argument_nodes if node.type == "identifier" and text_of(node) in tensors]
            if passed:
                # One finding per launch: the fix for one tensor applies to all.
                names = " and ".join(f"`{text_of(node)}`" for node in passed[:2])
                names += f" and {len(passed) - 2} more" if len(passed) > 2 else ""
                message = (
                    f"the kernel gets {names} without strides, so its result is wrong for non-contiguous tensors; "
                    "pass the strides, or call `.contiguous()` first"
                )
                yield finding_at("assumed-contiguous", Severity.HINT, passed[0], message)


def python_loop(root: Node, context: Context) -> Iterator[Finding]:
    """A Python loop over elements or rows of a tensor in ``forward``. Each iteration launches separate kernels."""
    if not {"torch", "torch.nn"} & set(context.imports.values()):
        return
    for function in functions(root):
        if not is_forward(function):
            continue
        for node in direct_nodes(function):
            if node.type != "for_statement":
                continue
            iterable, index = field(node, "right"), field(node, "left")
            sized_tensor = _loop_tensor(iterable)
            body = field(node, "body")
            if sized_tensor and index is not None and body is not None and _indexes(body, sized_tensor, text_of(index)):
                message = f"each iteration launches kernels for one part of `{sized_tensor}`; compute on the whole tensor instead"
                yield finding_at("python-loop", Severity.HINT, iterable or node, message)


def _loop_tensor(node: Node | None) -> str:
    """``x`` for ``range(x.shape[0])``, ``range(x.size(0))`` and ``range(len(x))``."""
    if node is None or node.type != "call" or text_of(field(node, "function")) != "range":
        return ""
    arguments = field(node, "arguments")
    last = arguments.named_children[-1] if arguments is not None and arguments.named_children else None
    text = text_of(last)
    for size_access in (".shape[", ".size("):
        if size_access in text and text.split(size_access)[0].isidentifier():
            return text.split(size_access)[0]
    inner = text.removeprefix("len(").removesuffix(")")
    return inner if text.startswith("len(") and inner.isidentifier() else ""


def _indexes(body: Node, tensor: str, index: str) -> bool:
    """Whether the body contains ``tensor[index]`` or ``tensor[:, index]``."""
    for node in walk(body):
        if node.type == "subscript" and text_of(field(node, "value")) == tensor:
            subscripts = node.children_by_field_name("subscript")
            if any(text_of(item) == index for item in subscripts):
                return True
    return False
