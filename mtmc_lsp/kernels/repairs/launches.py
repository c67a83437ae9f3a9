"""Repairs of launchers: grids, block sizes, arguments in another order, memory that must be zero."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tree_sitter import Node

from mtmc_lsp.kernels.messages import FaultKind
from mtmc_lsp.kernels.repairs.site import Launch, Repair, Site, repair, replaced
from mtmc_lsp.source.lint.kernel import argument, names_in
from mtmc_lsp.source.syntax import field, parse, text_of, walk

COVERAGE = (
    FaultKind.NOT_WRITTEN,
    FaultKind.WRONG_VALUES,
    FaultKind.WRITE_OUTSIDE,
    FaultKind.READ_OUTSIDE,
    FaultKind.RACE,
)
INITIAL = (FaultKind.UNINITIALISED, FaultKind.WRONG_VALUES, FaultKind.NOT_WRITTEN)
DIMENSIONS = ("0", "1", "2", "-1", "-2")
ALLOCATIONS = {
    "torch.empty": "torch.zeros", "torch.empty_like": "torch.zeros_like", "new_empty": "new_zeros", "torch.empty_strided": "",
}  # fmt: skip


def grid_repairs(site: Site) -> Iterator[Repair]:
    """Grids with too few programs: rounded down, divided by another number than the block, of another length."""
    for launch in site.launches:
        grid = launch.grid
        if grid is None:
            continue
        blocks = _block_texts(site, launch, grid)
        lengths = _length_texts(site, launch)
        for node in _with_named_values(launch, grid):
            left, right = field(node, "left"), field(node, "right")
            is_floor = node.type == "binary_operator" and text_of(field(node, "operator")) == "//"
            if is_floor and left is not None and right is not None:
                new = f"triton.cdiv({text_of(left)}, {text_of(right)})"
                yield repair("Round the grid up", node, COVERAGE, replaced(node, new))
                for block in blocks:
                    new = f"triton.cdiv({text_of(left)}, {block})"
                    yield repair(f"Divide the grid by {block}", node, COVERAGE, replaced(node, new), rank=2)
            if node.type == "binary_operator" and text_of(field(node, "operator")) in ("+", "-") and left is not None:
                yield repair(
                    f"Cover {text_of(left)} by the grid", node, COVERAGE, replaced(node, text_of(left)), rank=2
                )
            if node.type != "call" or not text_of(field(node, "function")).endswith("cdiv"):
                continue
            length, divisor = argument(node, 0, "x"), argument(node, 1, "y")
            for block in blocks:
                if divisor is not None and text_of(divisor) != block:
                    yield repair(f"Divide the grid by {block}", node, COVERAGE, replaced(divisor, block), rank=1)
            for text in lengths:
                if length is not None and text_of(length) != text:
                    yield repair(f"Cover {text} by the grid", node, COVERAGE, replaced(length, text), rank=4)
        if grid.type == "tuple":
            items = grid.named_children
            for item in items:
                for text in lengths:
                    if item.type != "call" and text_of(item) != text and item.type != "binary_operator":
                        yield repair(f"Cover {text} by the grid", item, COVERAGE, replaced(item, text), rank=4)
            if len(items) == 2:
                edits = (replaced(items[0], text_of(items[1])), replaced(items[1], text_of(items[0])))
                yield repair("Swap the dimensions of the grid", grid, COVERAGE, *edits, rank=3)


def _with_named_values(launch: Launch, grid: Node) -> Iterator[Node]:
    """The nodes of a grid, and of the values of the names in it."""
    yield from walk(grid)
    for name in dict.fromkeys(names_in(grid)):
        for value in launch.values.get(name, ()):
            yield from walk(value)


def _block_texts(site: Site, launch: Launch, grid: Node) -> list[str]:
    """Texts for the compile-time constants of a launch, as the grid can use them."""
    meta = field(field(launch.call, "function"), "subscript")
    value = launch.values.get(text_of(meta), [meta])[0] if meta is not None else None
    texts = []
    if value is not None and value.type == "lambda":
        parameter = text_of(field(value, "parameters"))
        texts = [f'{parameter}["{p.name}"]' for p in site.kernel.parameters.values() if p.is_constexpr]
    passed = launch.passed(site.kernel)
    texts += [text_of(passed[p.name]) for p in site.kernel.parameters.values() if p.is_constexpr and p.name in passed]
    return [text for text in dict.fromkeys(texts) if text not in ("True", "False", "None")]


def _length_texts(site: Site, launch: Launch) -> list[str]:
    """Arguments that are sizes."""
    passed = launch.passed(site.kernel)
    texts = [text_of(node) for name, node in passed.items() if name in site.numbers]
    return [text for text in dict.fromkeys(texts) if "stride" not in text and not text.replace(".", "").isdigit()]


def block_repairs(site: Site) -> Iterator[Repair]:
    """Block sizes that are no power of two."""
    kernel = site.kernel
    kinds = (FaultKind.RAISES,)
    for launch in site.launches:
        for name, node in launch.passed(kernel).items():
            parameter = kernel.parameters.get(name)
            if parameter is None or not parameter.is_constexpr:
                continue
            values = launch.values.get(text_of(node), ()) if node.type == "identifier" else ()
            for value in (*values, node):
                if value.type == "call" and text_of(field(value, "function")).endswith("next_power_of_2"):
                    continue
                new = f"triton.next_power_of_2({text_of(value)})"
                if value.type == "integer":
                    new = str(1 << max(int(text_of(value), 0) - 1, 0).bit_length())
                if value.type in ("true", "false", "none", "string", "float") or new == text_of(value):
                    continue
                yield repair(f"Make {name} a power of two", value, kinds, replaced(value, new))
    for call in walk(parse(site.text)):
        # triton.Config({"BLOCK": 48}), of an autotuner or a function that makes its configurations.
        if call.type != "call" or text_of(field(call, "function")).rpartition(".")[2] != "Config":
            continue
        for pair in (node for node in walk(call) if node.type == "pair"):
            key, value = field(pair, "key"), field(pair, "value")
            name = text_of(key).strip("'\"")
            parameter = kernel.parameters.get(name)
            if parameter is None or not parameter.is_constexpr or value is None or value.type != "integer":
                continue
            new = str(1 << max(int(text_of(value), 0) - 1, 0).bit_length())
            if new != text_of(value):
                title = f"Make {name} a power of two in a configuration"
                yield repair(title, value, kinds, replaced(value, new), rank=1)


def argument_repairs(site: Site) -> Iterator[Repair]:
    """Arguments of a launch that are swapped."""
    kinds = (
        FaultKind.WRONG_VALUES,
        FaultKind.READ_OUTSIDE,
        FaultKind.WRITE_OUTSIDE,
        FaultKind.NOT_WRITTEN,
        FaultKind.RACE,
    )
    for launch in site.launches:
        items = launch.positional
        for first, second in itertools.pairwise(items):
            if text_of(first) != text_of(second):
                title = f"Swap the arguments {text_of(first)} and {text_of(second)}"
                edits = (replaced(first, text_of(second)), replaced(second, text_of(first)))
                yield repair(title, first, kinds, *edits, rank=6)


def dimension_repairs(site: Site) -> Iterator[Repair]:
    """Sizes and strides of another dimension: ``x.stride(0)`` for ``x.stride(1)``."""
    for launch in site.launches:
        for node in walk(launch.function):
            number = None
            if node.type == "call" and text_of(field(node, "function")).rpartition(".")[2] in ("stride", "size"):
                number = argument(node, 0, "dim")
            elif node.type == "subscript" and text_of(field(node, "value")).endswith(".shape"):
                number = field(node, "subscript")
            for other in DIMENSIONS if number is not None else ():
                if number is not None and text_of(number) != other:
                    title = f"Use dimension {other} instead of {text_of(number)}"
                    yield repair(title, node, COVERAGE, replaced(number, other), rank=6)


def allocation_repairs(site: Site) -> Iterator[Repair]:
    """Memory that must be zero before the launch."""
    for launch in site.launches:
        for node in walk(launch.function):
            function = field(node, "function") if node.type == "call" else None
            text = text_of(function)
            new = ALLOCATIONS.get(text, "")
            if text.endswith(".new_empty"):
                new = text.removesuffix("new_empty") + "new_zeros"
            if function is not None and new:
                yield repair("Start with zeros", node, INITIAL, replaced(function, new))
