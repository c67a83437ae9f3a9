"""Checks of block shapes, of what must be known at compile time, and of Python's control flow on blocks."""

from __future__ import annotations

from collections.abc import Iterator

from tree_sitter import Node

from mtmc_lsp.source.lint.finding import Finding, Fix, Severity, found
from mtmc_lsp.source.lint.kernel import Kernel, argument, names_in
from mtmc_lsp.source.syntax import field, text_of, walk

SHAPED = {"zeros": (0, "shape"), "full": (0, "shape"), "static_range": (0, "end")}
"""Functions with an argument that must be known at compile time, besides ``arange``."""


def arange_bound(kernel: Kernel) -> Iterator[Finding]:
    """``tl.arange`` over a number of elements that is no power of two."""
    for name, call in kernel.calls:
        start, end = argument(call, 0, "start"), argument(call, 1, "end")
        if name != "arange" or start is None or end is None:
            continue
        if start.type == end.type == "integer":
            count = int(text_of(end), 0) - int(text_of(start), 0)
            if count <= 0 or count & (count - 1):
                wider = 1 << max(count - 1, 0).bit_length()
                message = f"a block has a power of two of elements, and not {count}; take {wider} and a mask"
                yield found("arange-bound", Severity.ERROR, call, message)


def missing_constexpr(kernel: Kernel) -> Iterator[Finding]:
    """A parameter that gives a block its shape and is no ``tl.constexpr``."""
    # A helper's parameters are constexpr where its caller's are; only a kernel that is launched is sure.
    if kernel.name not in kernel.context.launched:
        return
    reported: set[str] = set()
    for name, call in kernel.calls:
        shapes = [argument(call, 0, "start"), argument(call, 1, "end")] if name == "arange" else []
        if name in SHAPED:
            shapes = [argument(call, *SHAPED[name])]
        for shape in shapes:
            for word in names_in(shape) if shape is not None else ():
                parameter = kernel.parameters.get(word)
                if parameter is None or parameter.is_constexpr or word in reported or word in kernel.values:
                    continue
                reported.add(word)
                message = f"`{word}` gives a block its shape, so it must be a `tl.constexpr`"
                end = parameter.node.start_byte + len(word.encode())
                fix = Fix(f"Make {word} a tl.constexpr", end, end, ": tl.constexpr")
                is_plain = not parameter.annotation and kernel.context.imports.get("tl") == "triton.language"
                yield found("missing-constexpr", Severity.ERROR, parameter.node, message, fix if is_plain else None)


def tensor_condition(kernel: Kernel) -> Iterator[Finding]:
    """``if``, ``while``, ``and``, ``or``, ``not`` on a block: Python asks for one truth value, and there are many."""
    for node in walk(kernel.body):
        for condition, how in _conditions(node):
            if kernel.is_block(condition):
                message = f"`{text_of(condition)}` is a block with many truth values; {how}"
                yield found("tensor-condition", Severity.ERROR, condition, message)


def _conditions(node: Node) -> Iterator[tuple[Node, str]]:
    kind = node.type
    if kind in ("if_statement", "elif_clause", "while_statement"):
        condition = field(node, "condition")
        # What `and`, `or` and `not` join is looked at by itself.
        if condition is not None and condition.type not in ("boolean_operator", "not_operator"):
            yield condition, "choose with `tl.where`, or reduce it to one with `tl.max`"
    elif kind == "boolean_operator":
        word = text_of(field(node, "operator"))
        for side in (field(node, "left"), field(node, "right")):
            if side is not None:
                yield side, f"write `{'&' if word == 'and' else '|'}` instead of `{word}`"
    elif kind == "not_operator":
        operand = field(node, "argument")
        if operand is not None:
            yield operand, "write `~` instead of `not`"
