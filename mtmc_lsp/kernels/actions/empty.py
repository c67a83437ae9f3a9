"""*Empty*: a result that the kernel writes completely is created without values."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

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
MODULES = frozenset({"triton", "tl", "math", "torch"})
MOST_DEPTH = 4
"""Names that are replaced by their values one after the other."""
SIZE_CALLS = frozenset({"numel", "size", "stride", "dim", "len", "prod"})
LIMITS = frozenset({"load", "minimum", "maximum", "min", "max", "where", "clamp"})
"""Functions by which a kernel chooses elements for other reasons than their blocks."""


def empty_results(facts: Facts) -> Iterator[Proposal]:
    """``torch.empty`` in place of ``torch.zeros`` for a tensor that the next launch writes completely.

    Legal if the kernel only stores the tensor, and sizes alone decide which elements: no condition, no early end, no loaded
    value, and no number that the launcher's caller passes. Blocks of the store start at multiples and the grid rounds their
    number up, or one block contains a whole row. Masks compare offsets with sizes of tensors. Observation shows elements that
    nothing writes.
    """
    one = one_launch(facts)
    if one is None or any(
        node.type in ("return_statement", "while_statement") for node in walk(facts.site.kernel.body)
    ):
        return
    for parameter, value in one.passed.items():
        tensor = text_of(value)
        made = is_fresh(one, tensor, _is_filled) if value.type == "identifier" and parameter in facts.stored else None
        function = field(made, "function")
        stores = only_accesses(facts, parameter, "store")
        if made is None or function is None or stores is None:
            continue
        name = re.sub("zeros|ones", "empty", text_of(function))
        writes = _Writes(one, parameter, made)
        if not writes.has_exact_shape() or not any(map(writes.are_all, stores)):
            continue
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


class _Writes:
    """Whether stores write a tensor completely, at all sizes."""

    def __init__(self, one: OneLaunch, parameter: str, made: Node) -> None:
        """Consider a parameter of a kernel, and the call that creates its tensor."""
        self._one, self._parameter = one, parameter
        self._kernel = one.facts.site.kernel
        arguments = field(made, "arguments")
        items = arguments.named_children if arguments is not None else []
        is_like = text_of(field(made, "function")).endswith("_like")
        keywords = [
            item for item in items if item.type == "keyword_argument" and text_of(field(item, "name")) == "size"
        ]
        positional = [item for item in items if item.type not in ("keyword_argument", "comment")]
        self._shape = [] if is_like else [*positional, *keywords]

    def has_exact_shape(self) -> bool:
        """Whether the shape is that of another tensor, or made of sizes: not rounded up, which adds elements at some sizes."""
        return all(self._is_size(item, MOST_DEPTH) for item in self._shape)

    def are_all(self, store: Node) -> bool:
        """Whether sizes alone decide which elements a store writes, and its blocks follow one another without gaps."""
        kernel = self._kernel
        pointer, mask = argument(store, 0, "pointer"), argument(store, 2, "mask")
        if pointer is None or any(True for _ in kernel.enclosing.ancestors(store, "if_statement")):
            return False
        ranges = [field(loop, "right") for loop in kernel.enclosing.ancestors(store, "for_statement")]
        nodes = [n for source in kernel.sources(*filter(None, (pointer, mask, *ranges))) for n in walk(source)]
        calls = [
            (kernel.triton_name(field(n, "function")) or text_of(field(n, "function")), n)
            for n in nodes
            if n.type == "call"
        ]
        if any(name in LIMITS or name.startswith("atomic") for name, _ in calls) or any(map(_wraps, nodes)):
            return False
        if not all(self._is_chosen_by_sizes(text_of(node)) for node in nodes if _is_variable(node)):
            return False
        if not all(self._is_whole(text_of(argument(call, 1, "end"))) for name, call in calls if name == "arange"):
            return False
        axes = {text_of(argument(call, 0, "axis")) for name, call in calls if name == "program_id"}
        return self._grid_covers(axes) and (mask is None or all(map(self._is_bound, self._parts(mask))))

    def _is_chosen_by_sizes(self, name: str) -> bool:
        """Whether a name in a kernel is no number that the launcher's caller passes."""
        if name not in self._kernel.parameters or name == self._parameter:
            return True
        value = self._one.passed.get(name)
        if value is None:
            # A default, or the choice of an autotuner.
            return self._kernel.parameters[name].is_constexpr
        # Blocks may have any size.
        return self._is_whole(name) or self._is_size(value, MOST_DEPTH)

    def _grid_covers(self, axes: Collection[str]) -> bool:
        """Whether a grid has as many programs as sizes need, and divides only by rounding up.

        Args:
            axes: the axes whose programs store different elements.
        """
        grid = self._one.launch.grid
        if grid is None or grid.type != "tuple":
            return False
        counts = dict(enumerate(grid.named_children))
        return all(self._is_count(count, MOST_DEPTH) for count in counts.values()) and not any(
            count.type == "integer" for axis, count in counts.items() if str(axis) in axes
        )

    def _is_count(self, node: Node, depth: int) -> bool:
        """Whether a number of programs is a size, one divided by a block and rounded up, or a product of such."""
        if node.type == "parenthesized_expression":
            return self._is_count(node.named_children[0], depth)
        values = self._one.launch.values.get(text_of(node), []) if node.type == "identifier" else []
        if len(values) == 1 and depth and self._is_set_once(text_of(node)):
            return self._is_count(values[0], depth - 1) or self._is_size(node, depth)
        if node.type == "binary_operator" and text_of(field(node, "operator")) == "*":
            return all(self._is_count(child, depth) for child in node.named_children)
        divisor = argument(node, 1, "y") if node.type == "call" else field(node, "right")
        if divisor is not None and rounded_up(node, text_of(divisor)):
            total = argument(node, 0, "x") if node.type == "call" else field(node, "left")
            while total is not None and total.type in ("parenthesized_expression", "binary_operator"):
                if total.type == "binary_operator" and text_of(field(total, "operator")) == "*":
                    break
                total = field(total, "left") or total.named_children[0]
            return total is not None and self._is_size(total, depth) and self._is_block(divisor)
        return self._is_size(node, depth)

    def _is_block(self, divisor: Node) -> bool:
        """Whether a grid divides by a number, by what the configuration sets, or by what the launch passes to the kernel."""
        if divisor.type in ("integer", "subscript"):
            return True
        return text_of(divisor) in map(text_of, self._one.passed.values()) or self._is_size(divisor, MOST_DEPTH)

    def _is_whole(self, block: str) -> bool:
        """Whether blocks of a size cover a length: of all programs, of a loop, or one block of a whole row."""
        if block_counters(self._one.facts, block):
            return True
        size = self._one.passed.get(block)
        values = self._one.launch.values.get(text_of(size), []) if size is not None else []
        size = values[0] if len(values) == 1 and self._is_set_once(text_of(size)) else size
        if size is None or size.type != "call" or POWER.search(text_of(field(size, "function"))) is None:
            return False
        length = argument(size, 0, "n")
        return length is not None and self._is_size(length, MOST_DEPTH)

    def _parts(self, mask: Node) -> Iterator[Node]:
        """The comparisons of a mask, names replaced by their values."""
        for part in conjuncts(mask):
            inner = part
            while inner.type == "subscript":
                inner = field(inner, "value") or inner.named_children[0]
            values = self._kernel.values.get(text_of(inner), ()) if inner.type == "identifier" else ()
            if values:
                for value in values:
                    yield from self._parts(value)
            else:
                yield part

    def _is_bound(self, part: Node) -> bool:
        """Whether a comparison is ``offsets < length``."""
        operators = [text_of(child) for child in part.children if not child.is_named]
        if part.type != "comparison_operator" or operators != ["<"]:
            return False
        name = text_of(part.named_children[1])
        length = self._one.passed.get(name) if name not in self._kernel.values else None
        return length is not None and self._is_size(length, MOST_DEPTH)

    def _is_size(self, node: Node, depth: int) -> bool:
        """Whether an expression depends on shapes alone, and neither on an argument of the launcher nor by rounding."""
        for item in walk(node):
            if item.type == "binary_operator" and text_of(field(item, "operator")) not in ("*", "+", "-"):
                return False
            if item.type == "call" and text_of(field(item, "function")).rpartition(".")[2] not in SIZE_CALLS:
                return False
            name = text_of(item)
            if not _is_variable(item) or is_description(item) or name in SIZE_CALLS:
                continue
            top = [
                pair[1]
                for statement in self._one.before
                if (pair := assignment_in(statement)) is not None
                and any(text_of(part) == name for part in walk(pair[0]))
            ]
            if not top or len(top) != len(self._assignments(name)) or not depth:
                return False
            if not all(self._is_size(value, depth - 1) for value in top):
                return False
        return True

    def _assignments(self, name: str) -> list[Node]:
        """All places of the launcher that assign a name, also in branches and loops."""
        targets = (
            field(node, "left") or field(node, "name")
            for node in walk(self._one.launch.function)
            if node.type in ("assignment", "augmented_assignment", "for_statement", "named_expression", "for_in_clause")
        )
        return [target for target in targets if target is not None and name in map(text_of, walk(target))]

    def _is_set_once(self, name: str) -> bool:
        return len(self._assignments(name)) == 1


def _is_variable(node: Node) -> bool:
    return node.type == "identifier" and not is_label(node) and text_of(node) not in MODULES


def _wraps(node: Node) -> bool:
    """Whether an expression takes a remainder by a number, so that offsets stay below it."""
    operator, right = text_of(field(node, "operator")), field(node, "right")
    return node.type == "binary_operator" and operator == "%" and right is not None and right.type == "integer"
