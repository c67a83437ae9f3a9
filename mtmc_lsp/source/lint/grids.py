"""Checks of launches: the block sizes that they pass, and the grids beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tree_sitter import Node

from mtmc_lsp.source.lint.finding import Context, Finding, Fix, Severity, finding_at
from mtmc_lsp.source.lint.kernel import argument
from mtmc_lsp.source.lint.launchers import functions, launches
from mtmc_lsp.source.outline import BlockParameter
from mtmc_lsp.source.syntax import field, text_of, walk


@dataclass(frozen=True)
class _Block:
    """A block size that a launch passes as a number."""

    parameter: BlockParameter
    node: Node
    """The value in the launch."""
    size: int


def block_size(root: Node, context: Context) -> Iterator[Finding]:
    """A launch that passes a block size that is not a power of two."""
    for function, launch in _launches(root, context):
        for block in _blocks(function, launch, context):
            if block.size <= 0 or block.size & (block.size - 1):
                wider = 1 << max(block.size - 1, 0).bit_length()
                message = (
                    f"`{block.parameter.parameter}` is the size of a block in `{block.parameter.kernel}`, so it must be a "
                    f"power of two, not {block.size}; use {wider} and a mask"
                )
                yield finding_at("arange-bound", Severity.ERROR, block.node, message)


def grid_size(root: Node, context: Context) -> Iterator[Finding]:
    """A grid of one dimension that is divided by another number than the block size beside it."""
    for function, launch in _launches(root, context):
        strides = [block for block in _blocks(function, launch, context) if block.parameter.is_stride]
        divisor = _divisor(function, launch)
        if len(strides) != 1 or divisor is None:
            continue
        block, size = strides[0], _number(function, divisor)
        if size is None or size == block.size:
            continue
        effect = "some elements are left out" if size > block.size else "further programs have nothing to do"
        message = f"the grid has a program for each {size} elements, but `{block.parameter.parameter}` is {block.size}: {effect}"
        severity = Severity.WARNING if size > block.size else Severity.HINT
        value = text_of(block.node)
        fix = Fix(f"Divide the grid by {value}", divisor.start_byte, divisor.end_byte, value)
        yield finding_at("grid-size", severity, divisor, message, fix)


def _launches(root: Node, context: Context) -> Iterator[tuple[Node, Node]]:
    if context.blocks:
        for function in functions(root):
            yield from ((function, launch) for launch in launches(function, context))


def _blocks(function: Node, launch: Node, context: Context) -> Iterator[_Block]:
    kernel = text_of(field(field(launch, "function") or launch, "value"))
    for parameter in context.blocks:
        value = argument(launch, 1000, parameter.parameter) if parameter.kernel == kernel else None
        size = _number(function, value) if value is not None else None
        if value is not None and size is not None:
            yield _Block(parameter, value, size)


def _number(function: Node, node: Node) -> int | None:
    """The number that an expression is: a literal, or a name with one value that is a literal."""
    if node.type == "identifier":
        values = assigned_values(function).get(text_of(node), [])
        return _number(function, values[0]) if len(values) == 1 and values[0].type == "integer" else None
    return int(text_of(node), 0) if node.type == "integer" else None


def assigned_values(function: Node) -> Mapping[str, list[Node]]:
    """Local name to all expressions that are assigned to it."""
    values: dict[str, list[Node]] = {}
    for node in walk(function):
        left, right = field(node, "left"), field(node, "right")
        if node.type in ("assignment", "augmented_assignment") and left is not None and right is not None:
            values.setdefault(text_of(left), []).append(right)
    return values


def _divisor(function: Node, launch: Node) -> Node | None:
    """What a grid of one dimension divides the number of elements by; ``None`` if that is unknown."""
    callee = field(launch, "function")
    grid = field(callee, "subscript") if callee is not None else None
    if grid is not None and grid.type == "identifier":
        values = assigned_values(function).get(text_of(grid), [])
        grid = values[0] if len(values) == 1 else None
    if grid is not None and grid.type == "lambda":
        grid = field(grid, "body")
    if grid is not None and grid.type == "tuple":
        grid = grid.named_children[0] if len(grid.named_children) == 1 else None
    if grid is None or grid.type != "call" or not text_of(field(grid, "function")).endswith("cdiv"):
        return None
    return argument(grid, 1, "y")
