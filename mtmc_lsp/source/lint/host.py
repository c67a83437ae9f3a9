"""Checks of the Python around kernels: launchers and ``forward`` methods."""

from __future__ import annotations

from collections.abc import Iterator

from tree_sitter import Node

from mtmc_lsp.source.lint.finding import Context, Finding, Severity, found
from mtmc_lsp.source.lint.launchers import functions, is_forward, launches, own, tensor_parameters
from mtmc_lsp.source.syntax import field, text_of, walk

CARES = ("stride", "reshape", "view", "flatten", "ravel", "TensorDescriptor")
"""Words that show that a launcher thinks of layout, however it does."""


def assumed_contiguous(root: Node, context: Context) -> Iterator[Finding]:
    """A launcher that gives a kernel a tensor it was given, and nothing of how the tensor lies in memory."""
    if context.minds_layout:
        return
    for function in functions(root):
        tensors = tensor_parameters(function)
        # What the file itself calls may get tensors that were made contiguous before.
        is_inner = text_of(field(function, "name")) in context.called
        if is_inner or not tensors or any(word in text_of(function) for word in CARES):
            continue
        for launch in launches(function, context):
            arguments = field(launch, "arguments")
            given = arguments.named_children if arguments is not None else []
            passed = [node for node in given if node.type == "identifier" and text_of(node) in tensors]
            if passed:
                # One report for a launch: what is done about one tensor is done about all.
                names = " and ".join(f"`{text_of(node)}`" for node in passed[:2])
                names += f" and {len(passed) - 2} more" if len(passed) > 2 else ""
                message = (
                    f"the kernel gets {names} without strides, so it computes nonsense where these are not contiguous; "
                    "pass the strides, or call `.contiguous()` first"
                )
                yield found("assumed-contiguous", Severity.HINT, passed[0], message)


def python_loop(root: Node, context: Context) -> Iterator[Finding]:
    """A Python loop over a tensor's elements or rows in ``forward``: each turn launches kernels of its own."""
    if not {"torch", "torch.nn"} & set(context.imports.values()):
        return
    for function in functions(root):
        if not is_forward(function):
            continue
        for node in own(function):
            if node.type != "for_statement":
                continue
            over, index = field(node, "right"), field(node, "left")
            sized = _sized_by(over)
            body = field(node, "body")
            if sized and index is not None and body is not None and _indexes(body, sized, text_of(index)):
                message = f"each turn works on one part of `{sized}` with kernels of its own; work on the whole tensor"
                yield found("python-loop", Severity.HINT, over or node, message)


def _sized_by(node: Node | None) -> str:
    """``x`` for ``range(x.shape[0])``, ``range(x.size(0))`` and ``range(len(x))``."""
    if node is None or node.type != "call" or text_of(field(node, "function")) != "range":
        return ""
    arguments = field(node, "arguments")
    last = arguments.named_children[-1] if arguments is not None and arguments.named_children else None
    text = text_of(last)
    for mark in (".shape[", ".size("):
        if mark in text and text.split(mark)[0].isidentifier():
            return text.split(mark)[0]
    inner = text.removeprefix("len(").removesuffix(")")
    return inner if text.startswith("len(") and inner.isidentifier() else ""


def _indexes(body: Node, tensor: str, index: str) -> bool:
    """Whether ``tensor[index]`` or ``tensor[:, index]`` occurs."""
    for node in walk(body):
        if node.type == "subscript" and text_of(field(node, "value")) == tensor:
            subscripts = node.children_by_field_name("subscript")
            if any(text_of(item) == index for item in subscripts):
                return True
    return False
