"""Block sizes that launches pass as numbers, and that an autotuner may choose instead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tree_sitter import Node

from mtmc_lsp.kernels.actions.base import Facts, call_pointer
from mtmc_lsp.kernels.actions.offsets import block_offsets
from mtmc_lsp.kernels.actions.signatures import has_unknown_positions
from mtmc_lsp.kernels.actions.tuning.configuration import OPTIONS
from mtmc_lsp.kernels.actions.tuning.tiles import is_wrapped, reached, tile_numbers, unwrapped
from mtmc_lsp.kernels.repairs.site import Edit, Launch, replaced
from mtmc_lsp.source.lint.kernel import argument, names_in
from mtmc_lsp.source.lint.linear import linear
from mtmc_lsp.source.syntax import field, text_of, walk

ORDERED = frozenset({"cumsum", "cumprod", "associative_scan", "sort", "topk", "flip", "histogram"})
"""Functions whose results for one element depend on its place in the block."""


@dataclass(frozen=True)
class Block:
    """A block size that launches pass as a number and that may change."""

    name: str
    size: int
    grids: tuple[Edit, ...]
    """Edits that make grids read the size from the configuration."""


def free_blocks(facts: Facts) -> list[Block]:
    """The block sizes of a kernel that may change.

    Legal if each of its blocks starts at a multiple of it, the mask of each access of a block depends on the block, no other
    access depends on the number of a block, and nothing is computed by an element's place in its block. Each launch passes the
    size as a number, and nothing but the grid depends on it there.
    """
    if any(name in ORDERED for name, _ in facts.site.kernel.calls):
        return []
    known = {
        name: programs
        for name, parameter in facts.site.kernel.parameters.items()
        if parameter.is_constexpr and (programs := program_counters(facts, name)) is not None
    }
    blocks = [_block(facts, name, known) for name in known]
    return [block for block in blocks if block is not None]


def _block(facts: Facts, name: str, known: dict[str, frozenset[str]]) -> Block | None:
    """The block size of a parameter, as launches pass it; None if it must stay."""
    sizes: set[int] = set()
    grids: list[Edit] = []
    for launch in facts.site.launches:
        value = _passed(launch, facts, name)
        if value is None:
            return None
        local = text_of(value) if value.type == "identifier" else ""
        values = launch.values.get(local, [])
        number = values[0] if len(values) == 1 else value
        if number.type != "integer":
            size = _computed(launch, facts, name, value) if not known[name] or _reads(launch, name) else 0
            if not size:
                return None
            sizes.add(size)
            continue
        passed = launch.passed(facts.site.kernel)
        sharing = [other for other, item in passed.items() if text_of(item) == text_of(value)]
        counted = [other for other in sharing if other not in known or known[other]]
        is_ambiguous = counted != [name] and bool(known[name])
        if is_ambiguous and not _reads(launch, name):
            # The grid does not tell which of them it divides by.
            return None
        others = [item for item in (*launch.positional, *launch.keywords.values()) if item != value]
        if any(text_of(node) == text_of(value) for item in others if item.type == "call" for node in walk(item)):
            # Another argument depends on the block size: the number of blocks.
            return None
        if known[name]:
            edits = _grid_edits(launch, name, local or text_of(value), is_name=bool(local), sharing=len(sharing))
            if edits is None or (is_ambiguous and edits):
                return None
            grids += edits
        elif local and not _is_passed_only(launch, local):
            return None
        sizes.add(int(text_of(number), 0))
    size = sizes.pop() if len(sizes) == 1 else 0
    return Block(name, size, tuple(grids)) if size and not size & (size - 1) else None


def _reads(launch: Launch, name: str) -> bool:
    """Whether the grid is a function that reads a block size from the configuration."""
    holder = _grid_holder(launch)
    if holder is None or holder.type not in ("lambda", "function_definition"):
        return False
    meta = text_of(field(holder, "parameters")).strip("()")
    return any(f"{meta}[{quote}{name}{quote}]" in text_of(holder) for quote in ("'", '"'))


def _grid_holder(launch: Launch) -> Node | None:
    """The expression or the nested function that is the grid."""
    holder = field(field(launch.call, "function"), "subscript")
    if holder is None or holder.type != "identifier":
        return holder
    values = launch.values.get(text_of(holder), [])
    nested = [
        node
        for node in walk(launch.function)
        if node.type == "function_definition" and text_of(field(node, "name")) == text_of(holder)
    ]
    found = [*values, *(node for node in nested if node != launch.function)]
    return found[0] if len(found) == 1 else None


def _computed(launch: Launch, facts: Facts, name: str, value: Node) -> int:
    """The size in the observed launch of a block that a launcher computes; 0 if something else there depends on it.

    The grid, unless it reads the configuration, and the other arguments must not depend on it. The number of warps may, since a
    configuration sets it, too. A size that callers of the launcher pass stays theirs.
    """
    size = facts.constants.get(name)
    if not isinstance(size, int) or (value.type == "identifier" and not launch.values.get(text_of(value))):
        return 0
    if value.type not in ("identifier", "call", "conditional_expression", "subscript"):
        return 0
    tainted = {text_of(value)} if value.type == "identifier" else set()
    for _ in range(len(launch.values)):
        tainted |= {
            local for local, values in launch.values.items() if any(tainted & set(names_in(item)) for item in values)
        }
    keywords = [item for key, item in launch.keywords.items() if key not in OPTIONS]
    others = [item for item in (*launch.positional, *keywords) if item != value]
    others += [launch.grid] if launch.grid is not None else []
    subscript = field(field(launch.call, "function"), "subscript")
    others += [subscript] if subscript is not None else []
    return 0 if any(tainted & set(names_in(item)) for item in others) else size


def _passed(launch: Launch, facts: Facts, name: str) -> Node | None:
    """The argument that passes a block size: by keyword, or the last one by position."""
    if name in launch.keywords:
        return launch.keywords[name]
    if has_unknown_positions(launch):
        return None
    position = list(facts.site.kernel.parameters).index(name)
    return launch.positional[-1] if launch.positional and position == len(launch.positional) - 1 else None


def program_counters(facts: Facts, name: str) -> frozenset[str] | None:
    """What counts the blocks that programs compute; None if the results may depend on the block size."""
    counters = block_counters(facts, name)
    if counters is None or not all(_is_bounded(facts, name, set(counters), *access) for access in facts.site.accesses):
        return None
    return counters - _loop_variables(facts, name)


def block_counters(facts: Facts, name: str) -> frozenset[str] | None:
    """What counts the blocks of a size: variables of loops, and ``program_id(0)`` for ``pid * BLOCK + tl.arange(0, BLOCK)``.

    None if a block does not start at a multiple of its size.
    """
    site, counters = facts.site, set(_loop_variables(facts, name))
    aranges = [call for function, call in site.kernel.calls if function == "arange" and name in text_of(call)]
    for call in aranges:
        if text_of(argument(call, 1, "end")) != name:
            return None
        expressions = [v for values in site.kernel.values.values() for v in values if _contains(v, call)]
        blocks = [block_offsets(terms) for v in expressions if (terms := linear(unwrapped(v), site.kernel)) is not None]
        starts = {term for offsets in blocks if offsets is not None and name in offsets.start for term in offsets.start}
        counters |= starts - {name}
        if not counters:
            return None
    return frozenset(counters) if aranges else None


def _loop_variables(facts: Facts, name: str) -> frozenset[str]:
    """The variables of the loops over blocks of a size."""
    loops = [node for node in walk(facts.site.kernel.body) if node.type == "for_statement" and is_step(node, name)]
    return frozenset(text_of(field(loop, "left")) for loop in loops)


def is_step(loop: Node, name: str) -> bool:
    """Whether a loop goes over blocks: ``range(0, N, BLOCK)`` or ``range(0, tl.cdiv(N, BLOCK))``."""
    steps = field(loop, "right")
    if steps is None or steps.type != "call" or not text_of(field(steps, "function")).endswith("range"):
        return False
    items = [item for position in range(3) if (item := argument(steps, position, "")) is not None]
    if len(items) == 3:
        return text_of(items[0]) == "0" and text_of(items[2]) == name
    count = items[-1] if (items and text_of(items[0]) == "0") or len(items) == 1 else None
    if count is None or not text_of(field(count, "function")).endswith("cdiv"):
        return False
    return text_of(argument(count, 1, "div")) == name


def _is_bounded(facts: Facts, name: str, counters: set[str], kind: str, call: Node) -> bool:
    """Whether an access has a mask, runs only where blocks divide a length, or is the same for all block sizes.

    Args:
        counters: names of the numbers of blocks.
    """
    kernel, pointer = facts.site.kernel, call_pointer(call)
    mask = argument(call, 1 if kind == "load" else 2, "mask")
    functions = _calls_in(facts, pointer)
    if not _has_block(functions, name):
        tiles = tile_numbers(facts)
        used = {text_of(node) for node in reached(facts, pointer, tiles) if node.type == "identifier"}
        functions = [
            item for item in functions if any(_contains(node, item[1]) for node in reached(facts, pointer, tiles))
        ]
        used |= {
            f"program_id({text_of(argument(n, 0, 'axis'))})" for function, n in functions if function == "program_id"
        }
        is_counted = bool(used & counters) or any(function == "num_programs" for function, _ in functions)
        return pointer is not None and not is_counted and name not in used
    if _has_block(_calls_in(facts, mask), name) or (kind == "load" and is_wrapped(facts, pointer, name)):
        return True
    conditions = kernel.enclosing.ancestors(call, "if_statement")
    return any(text_of(field(item, "condition")).startswith("EVEN_") for item in conditions)


def _nodes_in(facts: Facts, node: Node | None) -> Iterator[Node]:
    """The nodes of an expression and of the values of its names."""
    for source in facts.site.kernel.sources(node) if node is not None else ():
        yield from walk(source)


def _calls_in(facts: Facts, node: Node | None) -> list[tuple[str, Node]]:
    """The calls of Triton's functions that an expression depends on, with the names of the functions."""
    calls = (item for item in _nodes_in(facts, node) if item.type == "call")
    return [(facts.site.kernel.triton_name(field(call, "function")), call) for call in calls]


def _has_block(calls: list[tuple[str, Node]], name: str) -> bool:
    return any(function == "arange" and name in text_of(call) for function, call in calls)


def _contains(node: Node, other: Node) -> bool:
    return node.start_byte <= other.start_byte and other.end_byte <= node.end_byte


def _uses_of(launch: Launch, local: str) -> Iterator[Node]:
    """The places where a launcher names a local variable, without the names of keyword arguments."""
    for node in walk(launch.function):
        if node.type == "identifier" and text_of(node) == local:
            parent = node.parent
            if parent is None or parent.type != "keyword_argument" or field(parent, "value") == node:
                yield node


def _is_passed_only(launch: Launch, local: str) -> bool:
    """Whether a local variable is assigned, passed to the launch and a divisor of the grid, and nothing else."""
    grid, arguments = launch.grid, field(launch.call, "arguments")
    assert arguments is not None
    return all(
        _is_target(node, launch) or _contains(arguments, node) or (grid is not None and _contains(grid, node))
        for node in _uses_of(launch, local)
    )


def _grid_edits(launch: Launch, parameter: str, value: str, *, is_name: bool, sharing: int) -> list[Edit] | None:
    """The edits that make a grid read the block size from the configuration; None if that is not possible.

    Args:
        sharing: how many parameters get the same value.
    """
    subscript = field(field(launch.call, "function"), "subscript")
    nested = _grid_holder(launch)
    if nested is not None and nested.type == "function_definition":
        has_value = any(text_of(node) == value for node in walk(nested))
        is_passed = not is_name or len(list(_uses_of(launch, value))) <= 1 + sharing
        return [] if _reads(launch, parameter) and not has_value and is_passed else None
    holder = subscript
    if subscript is not None and subscript.type == "identifier":
        values = launch.values.get(text_of(subscript), [])
        holder = values[0] if len(values) == 1 else None
        if holder is None or any(
            node.start_byte != subscript.start_byte and not _is_target(node, launch)
            for node in _uses_of(launch, text_of(subscript))
        ):
            return None
    if holder is None or holder.type not in ("tuple", "lambda"):
        return None
    is_lambda = holder.type == "lambda"
    meta = text_of(field(holder, "parameters")) if is_lambda else "META"
    sizes = [item for node in walk(holder) for item in rounded_up(node, value)]
    counts = _counts(launch, holder, value)
    if is_name:
        inside = [node for node in _uses_of(launch, value) if _contains(holder, node)]
        counted = [count for _, count in counts]
        elsewhere = [
            node
            for node in _uses_of(launch, value)
            if not any(_contains(other, node) for other in (holder, *counted)) and not _is_unused(launch, node)
        ]
        # The assignment and the arguments of the launch.
        if len(inside) != len(sizes) or len(elsewhere) > 1 + sharing:
            return None
    reads = f'{meta}["{parameter}"]' in text_of(holder) or f"{meta}['{parameter}']" in text_of(holder)
    if not sizes and not counts:
        return [] if is_lambda and reads else None
    edits = [replaced(item, f'{meta}["{parameter}"]') for item in sizes]
    for name, count in counts:
        edits += [replaced(name, f"{text_of(name)}({meta})"), Edit(count.start_byte, count.start_byte, "lambda META: ")]
        edits += [replaced(item, f'META["{parameter}"]') for item in rounded_up(count, value)]
    if is_lambda:
        return edits
    return [Edit(holder.start_byte, holder.start_byte, "lambda META: "), *edits]


def rounded_up(node: Node, value: str) -> list[Node]:
    """The places of a size in ``triton.cdiv(n, size)`` or ``(n + size - 1) // size``; empty for other expressions."""
    if node.type == "call" and text_of(field(node, "function")).endswith("cdiv"):
        divisor = argument(node, 1, "y")
        return [divisor] if divisor is not None and text_of(divisor) == value else []
    left, right = _operands(node, "//")
    if left is None or right is None or text_of(right) != value or left.type != "parenthesized_expression":
        return []
    total, one = _operands(left.named_children[0], "-")
    _, added = _operands(total, "+")
    return [added, right] if added is not None and text_of(added) == value and text_of(one) == "1" else []


def _operands(node: Node | None, operator: str) -> tuple[Node | None, Node | None]:
    if node is None or node.type != "binary_operator" or text_of(field(node, "operator")) != operator:
        return None, None
    return field(node, "left"), field(node, "right")


def _counts(launch: Launch, holder: Node, value: str) -> list[tuple[Node, Node]]:
    """The names in a grid that hold numbers of blocks, each with its value, and are used in no other place."""
    counts = []
    for node in walk(holder):
        values = launch.values.get(text_of(node), []) if node.type == "identifier" else []
        if len(values) != 1 or not rounded_up(values[0], value):
            continue
        uses = [use for use in _uses_of(launch, text_of(node)) if not _is_target(use, launch)]
        if uses == [node]:
            counts.append((node, values[0]))
    return counts


def _is_unused(launch: Launch, node: Node) -> bool:
    """Whether a node is part of a value that the launcher assigns and never uses."""
    for item in walk(launch.function):
        left, right = field(item, "left"), field(item, "right")
        if item.type == "assignment" and left is not None and right is not None and _contains(right, node):
            return left.type == "identifier" and len(list(_uses_of(launch, text_of(left)))) == 1
    return False


def _is_target(node: Node, launch: Launch) -> bool:
    """Whether a name is the target of its assignment."""
    return any(
        field(item, "left") is not None and field(item, "left") == node
        for item in walk(launch.function)
        if item.type == "assignment"
    )
