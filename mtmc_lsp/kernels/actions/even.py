"""*Even blocks*: loads without a mask, and offsets without a modulo, where blocks divide the length.

Triton's users write this as a constant ``EVEN_K``, which ``@triton.heuristics`` derives from the arguments at each launch. The
masked code stays for other sizes.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence

from tree_sitter import Node

from mtmc_lsp.kernels.actions.base import Facts, Proposal, assignment_of, indent_at, loops_of, statement_of
from mtmc_lsp.kernels.actions.numbers import trips
from mtmc_lsp.kernels.actions.offsets import (
    BlockOffsets,
    LoopSteps,
    block_offsets,
    bounded_by,
    conjuncts,
    is_start_of,
    loop_steps,
)
from mtmc_lsp.kernels.actions.signatures import (
    annotation,
    can_have_heuristics,
    decorated,
    even_name,
    module_prefix,
    with_parameter,
)
from mtmc_lsp.kernels.repairs.site import Edit, Site
from mtmc_lsp.source.lint.kernel import argument
from mtmc_lsp.source.lint.linear import linear
from mtmc_lsp.source.syntax import field, line_end, line_of, line_start, text_of, walk

MASK_SHARE = 0.05
"""Share of a loop's time that its masks are estimated to take: one comparison and one predicate for each load."""
NARROW, WIDE = 4.0, 16.0
"""Bytes that a lane loads at once without and with known contiguity."""


def even_loops(facts: Facts) -> Iterator[Proposal]:
    """Loops over the blocks of a length whose loads are masked by it.

    Legal because offsets ``start + tl.arange(0, BLOCK)`` of an iteration are all below the length if BLOCK divides it.
    """
    site = facts.site
    for loop in loops_of(site):
        steps = loop_steps(loop, site)
        if steps is None or not {steps.length, steps.block} <= site.kernel.parameters.keys():
            continue
        name = even_name(facts, steps.length)
        if not name or not can_have_heuristics(facts, [steps.length, steps.block]):
            continue

        def bounds(part: Node, steps: LoopSteps = steps) -> bool:
            offsets = bounded_by(part, site, steps.length)
            return offsets is not None and is_start_of(offsets, steps)

        forms = [form for node in _masked(loop, site) if (form := _without_mask(facts, node, bounds)) is not None]
        edits = _two_forms(facts, forms, name)
        head = _constant(facts, name, steps.length, steps.block)
        if edits and head:
            count = trips(loop, facts) or 1.0
            yield Proposal(
                "even-blocks",
                facts.name,
                f"Leave masks out where {steps.block} divides {steps.length}",
                (*head, *edits),
                line_of(loop),
                f"each of {count:.0f} iterations compares all offsets with {steps.length}",
                MASK_SHARE * facts.bound_us,
                condition=f"{steps.length} % {steps.block} == 0",
            )


def even_offsets(facts: Facts) -> Iterator[Proposal]:
    """Offsets ``(pid * BLOCK + tl.arange(0, BLOCK)) % M``: the modulo hides from the compiler that they are contiguous.

    Legal because block numbers are below ``tl.cdiv(M, BLOCK)``, so no offset reaches M if BLOCK divides it.
    """
    site, found = facts.site, dict[tuple[str, str], list[tuple[Node, Node, Node]]]()
    divided = {" ".join(text_of(node).split()) for node in walk(site.kernel.body) if node.type == "binary_operator"}
    for statement in walk(site.kernel.body):
        pair = assignment_of(statement) if statement.type == "expression_statement" else None
        value = pair[1] if pair is not None else None
        if pair is None or value is None or value.type != "binary_operator" or text_of(field(value, "operator")) != "%":
            continue
        left, right = field(value, "left"), field(value, "right")
        terms = linear(left, site.kernel) if left is not None else None
        offsets = block_offsets(terms) if terms is not None else None
        if left is None or right is None or offsets is None or not _is_block_start(offsets):
            continue
        if f"{text_of(left)} // {text_of(right)}" in divided:
            # A flat index of several dimensions exceeds the length of one.
            continue
        if right.type == "identifier" and {text_of(right), offsets.block} <= site.kernel.parameters.keys():
            found.setdefault((text_of(right), offsets.block), []).append((statement, left, pair[0]))
    for (length, block), places in found.items():
        name = even_name(facts, length)
        head = _constant(facts, name, length, block) if name and can_have_heuristics(facts, [length, block]) else ()
        if not head:
            continue
        edits = []
        for statement, left, target in places:
            inner = text_of(left)
            plain = inner[1:-1] if left.type == "parenthesized_expression" else inner
            variable, indent = text_of(target), indent_at(site.text, statement)
            new = f"{variable} = {plain}\n{indent}if not {name}:\n{indent}    {variable} = {variable} % {length}"
            edits.append(Edit(statement.start_byte, statement.end_byte, new))
        yield Proposal(
            "vectorize",
            facts.name,
            f"Leave the modulo out where {block} divides {length}",
            (*head, *edits),
            line_of(places[0][0]),
            f"after % {length} the compiler cannot prove that offsets are contiguous, so lanes load one element at a time",
            facts.cache_us(facts.moved) * (1.0 - NARROW / WIDE) / 2.0,
            condition=f"{length} % {block} == 0",
        )


def _is_block_start(offsets: BlockOffsets) -> bool:
    return len(offsets.start) == 2 and offsets.block in offsets.start


def _constant(facts: Facts, name: str, length: str, block: str) -> tuple[Edit, ...]:
    """The edits that add the constant; empty if they are not possible."""
    parameter = with_parameter(facts, f"{name}: {annotation(facts)}")
    rule = f'@{module_prefix(facts)}.heuristics({{"{name}": lambda args: args["{length}"] % args["{block}"] == 0}})'
    decorator = decorated(facts, [rule])
    return (decorator, parameter) if decorator is not None and parameter is not None else ()


def _masked(loop: Node, site: Site) -> list[Node]:
    """The loads and stores of a loop with a mask."""
    inside = range(loop.start_byte, loop.end_byte)
    return [
        call
        for name, call in site.accesses
        if call.start_byte in inside and argument(call, 1 if name == "load" else 2, "mask") is not None
    ]


def _without_mask(facts: Facts, call: Node, bounds: Callable[[Node], bool]) -> tuple[Node, str] | None:
    """The statement of an access, and its text for even blocks; None if its mask has no part that is bounded."""
    site = facts.site
    statement = statement_of(call, site.kernel.body)
    is_load = site.kernel.triton_name(field(call, "function")) == "load"
    mask = argument(call, 1 if is_load else 2, "mask")
    if statement is None or mask is None:
        return None
    whole = mask
    if mask.type == "identifier":
        values = site.kernel.values.get(text_of(mask), ())
        if len(values) != 1:
            return None
        whole = values[0]
    parts = list(conjuncts(whole))
    kept = [part for part in parts if not (part.type == "comparison_operator" and bounds(part))]
    lines = site.text[line_start(site.text, statement.start_byte) : line_end(site.text, statement.end_byte)]
    if len(kept) == len(parts) or b"#" in lines or b";" in lines:
        return None
    plain = _call_without(call, mask, " & ".join(_in_parentheses(part) for part in kept), is_load=is_load)
    source = text_of(statement).encode()
    start, end = call.start_byte - statement.start_byte, call.end_byte - statement.start_byte
    return statement, source[:start].decode() + plain + source[end:].decode()


def _two_forms(facts: Facts, forms: Sequence[tuple[Node, str]], name: str) -> list[Edit]:
    """Edits that give statements a form for even blocks; neighbouring ones share a condition."""
    text, edits = facts.site.text, list[Edit]()
    single = [form for i, form in enumerate(forms) if form[0] not in [other for other, _ in forms[:i]]]
    while single:
        group = [single.pop(0)]
        while single and not text[group[-1][0].end_byte : single[0][0].start_byte].strip():
            group.append(single.pop(0))
        indent = indent_at(text, group[0][0])
        new = [f"if {name}:"]
        new += [f"{indent}    {_deeper(even)}" for _, even in group]
        new += [f"{indent}else:"]
        new += [f"{indent}    {_deeper(text_of(statement))}" for statement, _ in group]
        edits.append(Edit(group[0][0].start_byte, group[-1][0].end_byte, "\n".join(new)))
    return edits


def _deeper(statement: str) -> str:
    """A statement of several lines, its further lines indented by one level more."""
    return textwrap.indent(statement, "    ").lstrip() if "\n" in statement else statement


def _in_parentheses(part: Node) -> str:
    text = text_of(part)
    return text if part.type in ("identifier", "call", "parenthesized_expression", "subscript") else f"({text})"


def _call_without(call: Node, mask: Node, kept: str, *, is_load: bool) -> str:
    """The text of an access with a smaller mask; without any, it has no ``other`` either."""
    arguments = field(call, "arguments")
    assert arguments is not None
    items = []
    for position, item in enumerate(i for i in arguments.named_children if i.type != "comment"):
        name = text_of(field(item, "name")) if item.type == "keyword_argument" else ""
        is_mask = mask.start_byte >= item.start_byte and mask.end_byte <= item.end_byte
        is_other = name == "other" or (is_load and not name and position == 2)
        if is_mask and kept:
            items.append(f"mask={kept}" if name else kept)
        elif not (is_mask or (is_other and not kept)):
            items.append(text_of(item))
    return f"{text_of(field(call, 'function'))}({', '.join(items)})"
