"""*One pass*: a mean and the variance around it come from one loop (Welford's recurrence in each lane)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from tree_sitter import Node

from mtmc_lsp.kernels.actions.base import (
    Facts,
    Proposal,
    after,
    assigned_in,
    assignment_of,
    before,
    indent_at,
    loops_of,
)
from mtmc_lsp.kernels.actions.offsets import loop_steps
from mtmc_lsp.kernels.actions.one_pass import (
    are_independent,
    are_neighbours,
    free_name,
    header_of,
    one_pass_proposal,
    only_assigns,
    statements_between,
    statements_of,
    without_lines,
)
from mtmc_lsp.kernels.repairs.site import Edit, Site, replaced
from mtmc_lsp.source.lint.kernel import argument
from mtmc_lsp.source.syntax import field, text_of, walk


@dataclass(frozen=True)
class _Mean:
    """``_mean += x`` in the first loop, and ``mean = tl.sum(_mean, axis=0) / N`` after it."""

    total: str
    name: str
    statement: Node
    sum: Node
    """``tl.sum(...)``."""


@dataclass(frozen=True)
class _Squares:
    """``_var += d * d`` in the second loop, with ``d = tl.where(mask, x - mean, 0.0)``."""

    total: str
    value: str
    mask: str
    """Empty if all lanes have values."""
    difference: Node
    update: Node


def one_pass_variance(facts: Facts) -> Iterator[Proposal]:
    """Two loops over the same elements, one for their sum and one for the squares of their distances from the mean.

    Legal if both loops have the same header and compute the same value, nothing in between uses the mean, no loop writes memory,
    and lanes outside the mask have a value. Each lane keeps its count, mean and squares, which are combined after the loop:
    rounding is that of two passes.
    """
    site = facts.site
    for first, second in itertools.pairwise(loops_of(site)):
        steps = loop_steps(first, site)
        if not are_neighbours(first, second) or header_of(first) != header_of(second) or steps is None:
            continue
        bodies = [statements_of(loop) for loop in (first, second)]
        between = statements_between(first, second)
        mean = _mean(site, bodies[0], between, steps.length)
        squares = _squares(site, bodies[1], mean.name) if mean is not None else None
        variance = _variance(site, second, squares, steps.length) if squares is not None else None
        if mean is None or squares is None or variance is None or squares.total == mean.total:
            continue
        if _renamed(bodies[0][:-1], _added(bodies[0][-1]), "") != _renamed(bodies[1][:-2], squares.value, ""):
            continue
        lost = assigned_in(first) - assigned_in(second) - {mean.total}
        if any(
            text_of(n) in lost
            for n in walk(site.kernel.body)
            if n.type == "identifier" and n.start_byte > first.end_byte
        ):
            continue
        rest = [item for item in between if item != mean.statement]
        is_apart = are_independent(rest, assigned_in(first) | {mean.name})
        if is_apart and all(only_assigns(site, item) for item in bodies[1][:-2]):
            yield _merged(facts, first, second, mean, squares, variance)


def _merged(
    facts: Facts, first: Node, second: Node, mean: _Mean, squares: _Squares, variance: tuple[Node, Node]
) -> Proposal:
    text, site = facts.site.text, facts.site
    taken = {*site.kernel.parameters, *site.kernel.values}
    count, delta = free_name("_count", taken), free_name("delta", taken)
    language = text_of(field(mean.sum, "function")).rpartition(".")[0]
    one = f"{language}.where({squares.mask}, 1.0, 0.0)" if squares.mask else "1.0"
    distance = f"{squares.value} - {mean.total}"
    lines = [
        f"{count} += {one}",
        f"{delta} = {language}.where({squares.mask}, {distance}, 0.0)" if squares.mask else f"{delta} = {distance}",
        f"{mean.total} += {delta} / {language}.maximum({count}, 1.0)",
        f"{squares.total} += {delta} * ({distance})",
    ]
    indent = indent_at(text, squares.difference)
    apart = f"({mean.total} - {mean.name})"
    old, new = text_of(mean.statement), text_of(mean.sum).replace(mean.total, f"{count} * {mean.total}", 1)
    edits = (
        without_lines(text, first),
        without_lines(text, mean.statement),
        before(text, second, f"{count} = {language}.zeros_like({mean.total})"),
        Edit(squares.difference.start_byte, squares.update.end_byte, f"\n{indent}".join(lines)),
        after(text, second, old.replace(text_of(mean.sum), new, 1)),
        replaced(variance[1], f"{squares.total} + {count} * {apart} * {apart}"),
    )
    return one_pass_proposal(facts, first, (mean.name, text_of(variance[0])), edits)


def _added(statement: Node) -> str:
    """The name that a statement ``total += name`` adds; empty for others."""
    inner = statement.named_children[0] if statement.type == "expression_statement" else None
    right = field(inner, "right")
    is_sum = inner is not None and inner.type == "augmented_assignment" and text_of(field(inner, "operator")) == "+="
    return text_of(right) if is_sum and right is not None and right.type == "identifier" else ""


def _renamed(statements: list[Node], name: str, new: str) -> list[str]:
    """The texts of assignments, with another name for the last value."""
    pairs = [assignment_of(item) for item in statements]
    return [
        f"{new if text_of(pair[0]) == name else text_of(pair[0])} = {text_of(pair[1])}" if pair is not None else "?"
        for pair in pairs
    ]


def _mean(site: Site, body: list[Node], between: list[Node], length: str) -> _Mean | None:
    if not body or not _added(body[-1]):
        return None
    total = text_of(field(body[-1].named_children[0], "left"))
    for statement in between:
        pair = assignment_of(statement)
        summed = _sum_over(site, pair[1], length) if pair is not None else None
        if pair is not None and summed is not None and text_of(argument(summed, 0, "input")) == total:
            return _Mean(total, text_of(pair[0]), statement, summed)
    return None


def _sum_over(site: Site, value: Node, length: str) -> Node | None:
    """The sum of ``tl.sum(x, axis=0) / length``."""
    left, right = field(value, "left"), field(value, "right")
    is_quotient = (
        value.type == "binary_operator" and text_of(field(value, "operator")) == "/" and text_of(right) == length
    )
    is_sum = left is not None and site.kernel.triton_name(field(left, "function")) == "sum"
    return left if is_quotient and is_sum else None


def _squares(site: Site, body: list[Node], mean: str) -> _Squares | None:
    if len(body) < 3:
        return None
    inner = body[-1].named_children[0] if body[-1].type == "expression_statement" else None
    left, right, pair = field(inner, "left"), field(inner, "right"), assignment_of(body[-2])
    if (
        inner is None
        or inner.type != "augmented_assignment"
        or text_of(field(inner, "operator")) != "+="
        or pair is None
    ):
        return None
    name = text_of(pair[0])
    if left is None or right is None or text_of(right) not in (f"{name} * {name}", f"{name}*{name}"):
        return None
    distance, mask = pair[1], ""
    if site.kernel.triton_name(field(distance, "function")) == "where":
        mask, outside = text_of(argument(distance, 0, "condition")), text_of(argument(distance, 2, "y"))
        inside = argument(distance, 1, "x")
        if inside is None or outside not in ("0.", "0.0", "0"):
            return None
        distance = inside
    value, shift = field(distance, "left"), field(distance, "right")
    loaded = assignment_of(body[-3])
    if value is None or text_of(field(distance, "operator")) != "-" or text_of(shift) != mean or loaded is None:
        return None
    load = next((call for name_, call in site.accesses if name_ == "load" and _is_in(call, body[-3])), None)
    if text_of(loaded[0]) != text_of(value) or load is None:
        return None
    known, other = text_of(argument(load, 1, "mask")), argument(load, 2, "other")
    if known != mask or (mask and other is None):
        return None
    return _Squares(text_of(left), text_of(value), mask, body[-2], body[-1])


def _variance(site: Site, loop: Node, squares: _Squares, length: str) -> tuple[Node, Node] | None:
    """The name and the summed operand of ``var = tl.sum(_var, axis=0) / N`` after a loop."""
    block = loop.parent
    for statement in block.named_children if block is not None else ():
        pair = assignment_of(statement) if statement.start_byte > loop.end_byte else None
        summed = _sum_over(site, pair[1], length) if pair is not None else None
        operand = argument(summed, 0, "input") if summed is not None else None
        if pair is not None and operand is not None and text_of(operand) == squares.total:
            return pair[0], operand
    return None


def _is_in(node: Node, other: Node) -> bool:
    return other.start_byte <= node.start_byte and node.end_byte <= other.end_byte
