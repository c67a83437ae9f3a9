"""*Empty*: a result that the kernel writes completely is created without values."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tree_sitter import Node

from mtmc_lsp.kernels.actions.base import Facts, Proposal
from mtmc_lsp.kernels.actions.fusion.launcher import (
    OneLaunch,
    assignment_in,
    is_description,
    is_fresh,
    is_label,
    one_launch,
    only_accesses,
)
from mtmc_lsp.kernels.actions.offsets import conjuncts
from mtmc_lsp.kernels.actions.tuning.blocks import block_counters, rounded_up
from mtmc_lsp.kernels.repairs.site import replaced
from mtmc_lsp.source.lint.kernel import argument
from mtmc_lsp.source.syntax import field, line_of, text_of, walk

FILLED = re.compile(r"(^|[._])(zeros|ones)(_like)?$")
POWER = re.compile(r"(^|\.)next_power_of_2$")
"""The smallest block that contains a row."""
MODULES = frozenset({"triton", "math", "torch"})
MOST_DEPTH = 4
"""Names that are replaced by their values one after the other."""


def empty_results(facts: Facts) -> Iterator[Proposal]:
    """``torch.empty`` in place of ``torch.zeros`` for a tensor that the next launch writes completely.

    Legal if the kernel only stores the tensor, and sizes alone decide which elements: no condition, no early end, no loaded
    value. Blocks of the store start at multiples and the grid rounds their number up, or one block contains a whole row. Masks
    compare offsets with sizes of tensors. Observation shows elements that nothing writes.
    """
    one = one_launch(facts)
    if one is None or not _covers_blocks(one):
        return
    for parameter, value in one.passed.items():
        tensor = text_of(value)
        made = is_fresh(one, tensor, _is_filled) if value.type == "identifier" and parameter in facts.stored else None
        function = field(made, "function")
        stores = only_accesses(facts, parameter, "store")
        if made is None or function is None or stores is None or not any(_is_complete(one, store) for store in stores):
            continue
        name = re.sub("zeros|ones", "empty", text_of(function))
        moved = float(max((a.tensor_bytes for a in facts.accesses if a.tensor == parameter), default=0))
        yield Proposal(
            "empty",
            facts.name,
            f"Create {tensor} without values",
            (replaced(function, name),),
            line_of(made),
            f"the kernel writes all elements of {tensor}, so {text_of(function)} writes {moved / 1e6:.1f} MB for nothing",
            facts.memory_us(moved),
            moved,
            0.0,
        )


def _is_filled(value: Node) -> bool:
    return value.type == "call" and FILLED.search(text_of(field(value, "function"))) is not None


def _covers_blocks(one: OneLaunch) -> bool:
    """Whether the grid divides only by rounding up, and no program ends early."""
    if any(node.type in ("return_statement", "while_statement") for node in walk(one.facts.site.kernel.body)):
        return False
    grid = one.launch.grid
    if grid is None:
        return False
    named = [text_of(node) for node in walk(grid) if node.type == "identifier"]
    parts = [grid, *(value for name in named for value in one.launch.values.get(name, []))]
    nodes = [node for part in parts for node in walk(part)]
    divisions = [node for node in nodes if node.type == "binary_operator" and text_of(field(node, "operator")) == "//"]
    calls = {text_of(field(node, "function")).rpartition(".")[2] for node in nodes if node.type == "call"}
    is_rounded = all(rounded_up(node, text_of(field(node, "right"))) for node in divisions)
    return is_rounded and not calls & {"min", "floor", "int"}


def _is_complete(one: OneLaunch, store: Node) -> bool:
    """Whether sizes alone decide which elements a store writes, and its blocks follow one another without gaps."""
    kernel = one.facts.site.kernel
    pointer, mask = argument(store, 0, "pointer"), argument(store, 2, "mask")
    if pointer is None or any(True for _ in kernel.enclosing.ancestors(store, "if_statement")):
        return False
    nodes = [n for source in kernel.sources(*filter(None, (pointer, mask))) for n in walk(source)]
    calls = [(kernel.triton_name(field(node, "function")), node) for node in nodes if node.type == "call"]
    if any(name == "load" or name.startswith("atomic") for name, _ in calls):
        return False
    if not all(_is_whole(one, text_of(argument(call, 1, "end"))) for name, call in calls if name == "arange"):
        return False
    return mask is None or all(_is_bound(part, one) for part in _parts(mask, one))


def _parts(mask: Node, one: OneLaunch) -> Iterator[Node]:
    """The comparisons of a mask, names replaced by their values."""
    for part in conjuncts(mask):
        inner = part
        while inner.type == "subscript":
            inner = field(inner, "value") or inner.named_children[0]
        values = one.facts.site.kernel.values.get(text_of(inner), ()) if inner.type == "identifier" else ()
        if values:
            for value in values:
                yield from _parts(value, one)
        else:
            yield part


def _is_bound(part: Node, one: OneLaunch) -> bool:
    """Whether a comparison is ``offsets < length``."""
    operators = [text_of(child) for child in part.children if not child.is_named]
    if part.type != "comparison_operator" or operators != ["<"]:
        return False
    length = one.passed.get(text_of(part.named_children[1]))
    return length is not None and _is_size(one, length, MOST_DEPTH)


def _is_size(one: OneLaunch, node: Node, depth: int) -> bool:
    """Whether an expression depends on shapes alone, and not on an argument of the launcher."""
    for item in walk(node):
        name = text_of(item)
        if item.type != "identifier" or is_label(item) or is_description(item) or name in MODULES:
            continue
        values = [
            pair[1]
            for statement in one.before
            if (pair := assignment_in(statement)) is not None and any(text_of(part) == name for part in walk(pair[0]))
        ]
        if not values or not depth or not all(_is_size(one, value, depth - 1) for value in values):
            return False
    return True


def _is_whole(one: OneLaunch, block: str) -> bool:
    """Whether blocks of a size cover a length: of all programs, of a loop, or one block of a whole row."""
    if block_counters(one.facts, block):
        return True
    size = one.passed.get(block)
    values = one.launch.values.get(text_of(size), []) if size is not None else []
    size = values[0] if len(values) == 1 else size
    return size is not None and size.type == "call" and POWER.search(text_of(field(size, "function"))) is not None
