"""*Hoist*: loads that a loop repeats go above it, and equal loads run once."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from tree_sitter import Node

from mtmc_lsp.kernels.actions.base import (
    Facts,
    Proposal,
    assigned_in,
    assignment_of,
    call_pointer,
    indent_at,
    loops_of,
    uses,
)
from mtmc_lsp.kernels.actions.numbers import trips
from mtmc_lsp.kernels.repairs.site import Edit, Site
from mtmc_lsp.source.lint.kernel import argument
from mtmc_lsp.source.syntax import field, line_end, line_of, line_start, text_of, walk

EFFECTS = ("store", "debug_barrier", "device_print", "inline_asm_elementwise", "rand", "randn", "randint")
UNKNOWN_TRIPS = 2.0
"""Iterations of a loop whose length is unknown, for estimates."""


def hoist(facts: Facts) -> Iterator[Proposal]:
    """Loads whose pointer and mask do not change in a loop.

    Legal if nothing in the loop writes memory or calls an unknown function, the loaded name is assigned only once, and the
    load has a mask or the loop runs at least once: then it reads nothing that it would not read in the loop.
    """
    text = facts.site.text
    for loop in loops_of(facts.site):
        body = field(loop, "body")
        if body is None or not _is_quiet(loop, facts.site):
            continue
        changing = assigned_in(loop)
        for statement in body.named_children:
            pair = assignment_of(statement)
            load = _load_in(pair[1], facts.site) if pair is not None else None
            if pair is None or load is None or not _is_alone(statement, text):
                continue
            name = text_of(pair[0])
            if uses(pair[1]) & changing or len(facts.site.kernel.values.get(name, ())) != 1:
                continue
            count = trips(loop, facts)
            if argument(load, 1, "mask") is None and not count:
                continue
            yield _moved(facts, loop, statement, load, count or UNKNOWN_TRIPS)


def _moved(facts: Facts, loop: Node, statement: Node, load: Node, count: float) -> Proposal:
    text = facts.site.text
    start, end = line_start(text, statement.start_byte), line_end(text, statement.end_byte)
    lines = textwrap.dedent(text[start:end].decode())
    above = line_start(text, loop.start_byte)
    new = textwrap.indent(lines, indent_at(text, loop))
    access = facts.access_at(load)
    moved = float(access.bytes) if access is not None else 0.0
    left = moved / max(count, 1.0)
    tensor = access.tensor if access is not None else text_of(call_pointer(load))
    return Proposal(
        "hoist",
        facts.name,
        f"Load {tensor} once above the loop",
        (Edit(above, above, new), Edit(start, end, "")),
        line_of(statement),
        f"each of {count:.0f} iterations loads the same elements of {tensor}",
        facts.cache_us(moved - left),
        moved,
        left,
    )


def equal_loads(facts: Facts) -> Iterator[Proposal]:
    """A load that repeats an earlier one of the same block.

    Legal if nothing is written between them, and no name of the load or of its result is assigned again.
    """
    for block in walk(facts.site.kernel.body):
        if block.type != "block" and block != facts.site.kernel.body:
            continue
        earlier: dict[str, tuple[str, Node]] = {}
        for statement in block.named_children:
            pair = assignment_of(statement)
            value = text_of(pair[1]) if pair is not None else ""
            load = _load_in(pair[1], facts.site) if pair is not None else None
            if pair is not None and load is not None and value in earlier:
                name, _ = earlier[value]
                access = facts.access_at(load)
                moved = float(access.bytes) if access is not None else 0.0
                yield Proposal(
                    "hoist",
                    facts.name,
                    f"Use {name} instead of the same load again",
                    (Edit(pair[1].start_byte, pair[1].end_byte, name),),
                    line_of(statement),
                    f"the elements are those of {name}",
                    facts.cache_us(moved),
                    moved,
                    0.0,
                )
            if not _is_quiet(statement, facts.site):
                earlier = {}
            changed = assigned_in(statement)
            earlier = {t: (n, v) for t, (n, v) in earlier.items() if n not in changed and not uses(v) & changed}
            if pair is not None and load is not None and text_of(pair[0]) not in uses(pair[1]):
                earlier[value] = (text_of(pair[0]), pair[1])


def _is_quiet(node: Node, site: Site) -> bool:
    """Whether a statement writes no memory, as far as its text shows: it calls only functions of Triton without effects."""
    for call in walk(node):
        if call.type != "call":
            continue
        function = field(call, "function")
        name = site.kernel.triton_name(function)
        is_method = function is not None and function.type == "attribute" and not name
        if name in EFFECTS or name.startswith("atomic"):
            return False
        if not name and not is_method and text_of(function) not in ("range", "min", "max", "abs", "float", "int"):
            return False
    return True


def _load_in(value: Node, site: Site) -> Node | None:
    """The only load of an expression."""
    loads = [n for n in walk(value) if n.type == "call" and site.kernel.triton_name(field(n, "function")) == "load"]
    return loads[0] if len(loads) == 1 else None


def _is_alone(statement: Node, text: bytes) -> bool:
    """Whether no other statement shares its lines."""
    line = text[line_start(text, statement.start_byte) : line_end(text, statement.end_byte)].decode()
    rest = line.strip().removeprefix(text_of(statement)).strip()
    return not rest or rest.startswith("#")
