"""Persistent programs: a fixed number of them, each doing one piece of work after another.

What does not depend on the piece (weights shared by all rows, column indices) is read once per program instead of once per piece.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from mtmc_lsp.core.protocols import CannotCode

PROGRAMS = ("pid = tl.program_id(0)", "pid = tl.cast(tl.program_id(0), tl.int64)")
PIECE = "tl.program_id(0).to(tl.int64)"


def one_tile_after_another(lines: Sequence[str]) -> list[str]:
    """The body of a product kernel, looped over tiles."""
    ir = next((line.removeprefix("pid = ") for line in lines if line in PROGRAMS), None)
    if ir is None:
        raise CannotCode("this product has an order of programs of its own")
    shared: list[str] = []
    rest: list[str] = []
    said: list[str] = []
    for line in lines:
        if line in PROGRAMS:
            shared += said
        elif line.startswith("#"):
            said.append(line)
            continue
        else:
            is_shared = re.match(r"(blocks_[mn]|batch) = |\w+ = tl\.make_tensor_descriptor", line) is not None
            (shared if is_shared else rest).extend([*said, line])
        said = []
    loop = f"for pid in range({ir}, blocks_m * blocks_n, tl.num_programs(0)):"
    return [*shared, loop, *(f"    {line}" for line in rest)]


def one_group_after_another(lines: Sequence[str], pieces: str) -> list[str]:
    """The body of a tile kernel, whose first line sets the row, rows or columns, looped over ``pieces`` of work.

    Statements that no piece takes part in come before the loop; a kernel never writes what it reads, so that is the same.
    """
    first, *rest = lines
    name, _, index = first.partition(" = ")
    head: list[str] = []
    if index != PIECE:
        head = [first.replace(PIECE, "group")]
    loop = f"for {'group' if head else name} in range({PIECE}, {pieces}, tl.num_programs(0)):"
    before, inside = parted(rest, {name, "group"})
    return [*before, loop, *(f"    {line}" for line in [*head, *inside])]


def parted(lines: Sequence[str], varying: set[str]) -> tuple[list[str], list[str]]:
    """Statements that do not depend on ``varying`` names, and the others; a loop stays whole."""
    counts: dict[str, int] = {}
    for line in lines:
        assigned = re.match(r"\s*(\w+)(?:, \w+)* [-+*]?= ", line)
        if assigned:
            counts[assigned.group(1)] = counts.get(assigned.group(1), 0) + 1
    before: list[str] = []
    inside: list[str] = []
    for line in lines:
        assigned = re.match(r"(\w+) = ", line)
        fixed = assigned is not None and counts[assigned.group(1)] == 1
        if fixed and not varying & set(re.findall(r"[A-Za-z_]\w*", line)):
            before.append(line)
            continue
        inside.append(line)
        if any_assigned := re.match(r"\s*(\w+) [-+*]?= ", line):
            varying.add(any_assigned.group(1))
    return before, inside
