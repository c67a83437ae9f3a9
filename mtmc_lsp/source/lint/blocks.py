"""Checks of block shapes, compile-time constants, and Python control flow on blocks."""

from __future__ import annotations

from collections.abc import Iterator

from tree_sitter import Node

from mtmc_lsp.source.lint.finding import Finding, Fix, Severity, finding_at
from mtmc_lsp.source.lint.kernel import Kernel, argument, names_in
from mtmc_lsp.source.syntax import field, text_of, walk

SHAPE_ARGUMENTS = {"zeros": (0, "shape"), "full": (0, "shape"), "static_range": (0, "end")}
"""Functions other than ``arange`` with an argument that must be a compile-time constant: its position and keyword."""
CONDITIONAL = ("if_statement", "elif_clause", "while_statement")


def arange_bound(kernel: Kernel) -> Iterator[Finding]:
    """``tl.arange`` with a number of elements that is not a power of two."""
    for name, call in kernel.calls:
        start, end = argument(call, 0, "start"), argument(call, 1, "end")
        if name != "arange" or start is None or end is None:
            continue
        if start.type == end.type == "integer":
            count = int(text_of(end), 0) - int(text_of(start), 0)
            if count <= 0 or count & (count - 1):
                wider = 1 << max(count - 1, 0).bit_length()
                message = f"the size of a block must be a power of two, not {count}; use {wider} and a mask"
                yield finding_at("arange-bound", Severity.ERROR, call, message)


def missing_constexpr(kernel: Kernel) -> Iterator[Finding]:
    """A parameter that determines a block shape but is not ``tl.constexpr``."""
    # Helper functions may receive a constexpr from their caller, so only launched kernels are checked.
    if kernel.name not in kernel.context.launched:
        return
    reported: set[str] = set()
    for name, call in kernel.calls:
        shapes = [argument(call, 0, "start"), argument(call, 1, "end")] if name == "arange" else []
        if name in SHAPE_ARGUMENTS:
            shapes = [argument(call, *SHAPE_ARGUMENTS[name])]
        for shape in shapes:
            for name in names_in(shape) if shape is not None else ():
                parameter = kernel.parameters.get(name)
                if parameter is None or parameter.is_constexpr or name in reported or name in kernel.values:
                    continue
                reported.add(name)
                message = f"`{name}` determines the shape of a block, so it must be a `tl.constexpr`"
                end = parameter.node.start_byte + len(name.encode())
                fix = Fix(f"Make {name} a tl.constexpr", end, end, ": tl.constexpr")
                is_plain = not parameter.annotation and kernel.context.imports.get("tl") == "triton.language"
                yield finding_at(
                    "missing-constexpr", Severity.ERROR, parameter.node, message, fix if is_plain else None
                )


def tensor_condition(kernel: Kernel) -> Iterator[Finding]:
    """``if`` and ``while`` on a block, which need a single truth value; ``and`` and ``or`` on blocks, which are deprecated.

    Triton computes ``and``, ``or`` and ``not`` of blocks for each element. They are errors only in a condition.
    """
    for node in walk(kernel.body):
        for condition, advice in _conditions(node):
            if not kernel.is_block(condition):
                continue
            if node.type in CONDITIONAL or _is_in_condition(node):
                message = f"`{text_of(condition)}` is a block, not a single truth value; {advice}"
                yield finding_at("tensor-condition", Severity.ERROR, condition, message)
            elif node.type == "boolean_operator":
                name = text_of(field(node, "operator"))
                message = f"`{name}` is deprecated for blocks such as `{text_of(condition)}`; {advice}"
                yield finding_at("tensor-condition", Severity.WARNING, condition, message)


def _is_in_condition(node: Node) -> bool:
    """Whether the truth of an expression decides a branch."""
    parent = node.parent
    while parent is not None and parent.type in ("boolean_operator", "not_operator", "parenthesized_expression"):
        node, parent = parent, parent.parent
    return parent is not None and parent.type in CONDITIONAL and field(parent, "condition") == node


def _conditions(node: Node) -> Iterator[tuple[Node, str]]:
    kind = node.type
    if kind in CONDITIONAL:
        condition = field(node, "condition")
        # Operands of `and`, `or` and `not` are checked individually.
        if condition is not None and condition.type not in ("boolean_operator", "not_operator"):
            yield condition, "select values with `tl.where`, or reduce the block with `tl.max`"
    elif kind == "boolean_operator":
        name = text_of(field(node, "operator"))
        for side in (field(node, "left"), field(node, "right")):
            if side is not None:
                yield side, f"write `{'&' if name == 'and' else '|'}` instead of `{name}`"
    elif kind == "not_operator":
        operand = field(node, "argument")
        if operand is not None:
            yield operand, "write `~` instead of `not`"
