"""*One pass*: a maximum and the sum of exponentials that it shifts come from one loop (online softmax)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

from tree_sitter import Node

from mtmc_lsp.kernels.actions.base import Facts, Proposal, assigned_in, assignment_of, indent_at, loops_of, uses
from mtmc_lsp.kernels.repairs.site import Edit, Site
from mtmc_lsp.source.lint.kernel import argument
from mtmc_lsp.source.syntax import field, line_end, line_of, line_start, text_of, walk

EXPONENTIALS = ("exp", "exp2")
WRITING = ("store", "debug_barrier", "device_print", "inline_asm_elementwise")
BUILTINS = ("float", "int", "abs", "min", "max")


@dataclass(frozen=True)
class _Maximum:
    """``m = tl.maximum(m, tl.max(x, axis=0))``."""

    name: str
    update: str
    """Text of the new maximum."""
    operand: str
    language: str


@dataclass(frozen=True)
class _Sum:
    """``s += tl.sum(tl.exp(x - m), axis=0)``."""

    name: str
    operand: str
    shift: str
    """``m`` or ``m[:, None]``."""
    exponential: str
    """``tl.exp`` as the author writes it."""
    addend: Node
    """``tl.sum(...)``."""
    statement: Node
    extra: Node | None
    """The statement that names the exponentials, if there is one."""


def online_softmax(facts: Facts) -> Iterator[Proposal]:
    """Two neighbouring loops over the same elements, one for their maximum and one for the sum of their exponentials.

    Legal if both loops have the same header and the same statements, but for the last ones, nothing in between uses the
    maximum, and no loop writes memory: when the maximum grows, the sum so far is scaled. Rows of negative infinity alone sum
    up to 0 instead of NaN.
    """
    site = facts.site
    loops = loops_of(site)
    for first, second in itertools.pairwise(loops):
        if not are_neighbours(first, second) or header_of(first) != header_of(second):
            continue
        bodies = [statements_of(loop) for loop in (first, second)]
        maximum = _maximum(site, bodies[0][-1]) if bodies[0] else None
        total = _sum(site, bodies[1]) if maximum is not None else None
        if maximum is None or total is None or total.operand != maximum.operand:
            continue
        if total.shift.partition("[")[0] != maximum.name or total.name == maximum.name:
            continue
        same = [text_of(item) for item in bodies[0][:-1]]
        others = [item for item in bodies[1] if item not in (total.statement, total.extra)]
        if [text_of(item) for item in others] != same or not all(only_assigns(site, item) for item in others):
            continue
        if maximum.name in {name for item in others for name in uses(item)} or not _stays_between(first, second):
            continue
        yield _merged(facts, first, maximum, total)


def _merged(facts: Facts, first: Node, maximum: _Maximum, total: _Sum) -> Proposal:
    text, language = facts.site.text, maximum.language
    taken = {*facts.site.kernel.parameters, *facts.site.kernel.values}
    new = free_name(f"new_{maximum.name}", taken)
    shift = free_name(f"{maximum.name}_shift", taken | {new})
    addend = text_of(total.addend)
    if total.extra is not None:
        pair = assignment_of(total.extra)
        assert pair is not None
        addend = addend.replace(text_of(pair[0]), text_of(pair[1]), 1)
    exponent = f"{total.operand} - {total.shift}"
    addend = addend.replace(exponent, f"{total.operand} - {total.shift.replace(maximum.name, shift, 1)}", 1)
    lines = [
        f"{new} = {maximum.update}",
        f'{shift} = {language}.where({new} == float("-inf"), 0.0, {new})',
        f"{total.name} = {total.name} * {total.exponential}({maximum.name} - {shift}) + {addend}",
        f"{maximum.name} = {new}",
    ]
    indent = indent_at(text, total.statement)
    start = (total.extra or total.statement).start_byte
    merged = Edit(start, total.statement.end_byte, f"\n{indent}".join(lines))
    return one_pass_proposal(facts, first, (maximum.name, total.name), (without_lines(text, first), merged))


def one_pass_proposal(facts: Facts, loop: Node, names: tuple[str, str], edits: tuple[Edit, ...]) -> Proposal:
    """The edits that leave out a loop whose elements the next one loads as well.

    Args:
        names: the two results that one loop then computes.
    """
    loads = [call for name, call in facts.site.accesses if name == "load" and _is_in(call, loop)]
    moved = float(sum(access.bytes for load in loads if (access := facts.access_at(load)) is not None))
    is_cached = moved <= facts.device.l2_bytes
    return Proposal(
        "one-pass",
        facts.name,
        f"Compute {names[0]} and {names[1]} in one pass",
        edits,
        line_of(loop),
        "both loops load the same elements",
        facts.cache_us(moved) if is_cached else facts.memory_us(moved),
        facts.moved,
        facts.moved - moved,
    )


def without_lines(text: bytes, node: Node) -> Edit:
    """Remove the lines of a statement."""
    return Edit(line_start(text, node.start_byte), line_end(text, node.end_byte - 1), "")


# Reading -------------------------------------------------------------------------------------------------------------


def statements_of(loop: Node) -> list[Node]:
    """The statements of a loop."""
    body = field(loop, "body")
    return [item for item in body.named_children if item.type != "comment"] if body is not None else []


def header_of(loop: Node) -> str:
    """The variable and the range of a loop."""
    return f"{text_of(field(loop, 'left'))} in {' '.join(text_of(field(loop, 'right')).split())}"


def are_neighbours(first: Node, second: Node) -> bool:
    """Whether two loops are statements of one block."""
    one, other = first.parent, second.parent
    return one is not None and other is not None and one == other and first.end_byte <= second.start_byte


def statements_between(first: Node, second: Node) -> list[Node]:
    """The statements between two loops of one block."""
    block = first.parent
    return [
        item
        for item in (block.named_children if block is not None else ())
        if first.end_byte <= item.start_byte and item.end_byte <= second.start_byte and item.type != "comment"
    ]


def _stays_between(first: Node, second: Node) -> bool:
    """Whether all statements between the loops are assignments without the values of the first loop."""
    return are_independent(statements_between(first, second), assigned_in(first))


def are_independent(statements: Sequence[Node], changed: Set[str]) -> bool:
    """Whether all statements are assignments that neither read nor write these names."""
    pairs = [assignment_of(item) for item in statements]
    return all(pair is not None and not uses(pair[1]) & changed and text_of(pair[0]) not in changed for pair in pairs)


def _maximum(site: Site, statement: Node) -> _Maximum | None:
    pair = assignment_of(statement)
    if pair is None or pair[1].type != "call" or site.kernel.triton_name(field(pair[1], "function")) != "maximum":
        return None
    name, operands = text_of(pair[0]), [argument(pair[1], position, "") for position in range(2)]
    inner = next((item for item in operands if item is not None and item.type == "call"), None)
    kept = next((item for item in operands if item is not None and text_of(item) == name), None)
    if inner is None or kept is None or site.kernel.triton_name(field(inner, "function")) != "max":
        return None
    operand = argument(inner, 0, "input")
    language = text_of(field(pair[1], "function")).rpartition(".")[0]
    return _Maximum(name, text_of(pair[1]), text_of(operand), language) if operand is not None and language else None


def _sum(site: Site, statements: list[Node]) -> _Sum | None:
    if not statements:
        return None
    statement = statements[-1]
    inner = statement.named_children[0] if statement.type == "expression_statement" else None
    left, right = field(inner, "left"), field(inner, "right")
    if inner is None or left is None or right is None:
        return None
    addend: Node | None = right
    if inner.type == "assignment":
        operands = [field(right, "left"), field(right, "right")] if text_of(field(right, "operator")) == "+" else []
        rest = [item for item in operands if item is not None and text_of(item) != text_of(left)]
        addend = rest[0] if len(operands) == 2 and len(rest) == 1 else None
    elif inner.type != "augmented_assignment" or text_of(field(inner, "operator")) != "+=":
        return None
    if addend is None or site.kernel.triton_name(field(addend, "function")) != "sum":
        return None
    summed, extra = argument(addend, 0, "input"), None
    if summed is not None and summed.type == "identifier" and len(statements) > 1:
        pair = assignment_of(statements[-2])
        if pair is None or text_of(pair[0]) != text_of(summed) or _is_used_elsewhere(site, text_of(summed)):
            return None
        extra, summed = statements[-2], pair[1]
    if summed is None or site.kernel.triton_name(field(summed, "function")) not in EXPONENTIALS:
        return None
    exponent = argument(summed, 0, "x")
    operand, shift = field(exponent, "left"), field(exponent, "right")
    if operand is None or shift is None or text_of(field(exponent, "operator")) != "-":
        return None
    if text_of(exponent) != f"{text_of(operand)} - {text_of(shift)}":
        return None
    exponential = text_of(field(summed, "function"))
    return _Sum(text_of(left), text_of(operand), text_of(shift), exponential, addend, statement, extra)


def _is_used_elsewhere(site: Site, name: str) -> bool:
    uses_of = [item for item in walk(site.kernel.body) if item.type == "identifier" and text_of(item) == name]
    return len(uses_of) != 2


def only_assigns(site: Site, statement: Node) -> bool:
    """Whether a statement assigns a name and calls only functions of Triton that write nothing."""
    pair = assignment_of(statement)
    if pair is None:
        return False
    for call in (field(node, "function") for node in walk(pair[1]) if node.type == "call"):
        name, text = site.kernel.triton_name(call), text_of(call)
        if name in WRITING or name.startswith("atomic") or not (name or text in BUILTINS or text.endswith(".to")):
            return False
    return True


def _is_in(node: Node, other: Node) -> bool:
    return other.start_byte <= node.start_byte and node.end_byte <= other.end_byte


def free_name(name: str, taken: set[str]) -> str:
    """The name, with a number if it is taken."""
    return next(each for each in (name, *(f"{name}_{i}" for i in range(1, 100))) if each not in taken)
