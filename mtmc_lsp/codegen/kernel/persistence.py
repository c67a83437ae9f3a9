"""Persistent kernels: a fixed number of program instances, each of which loops over work items.

Loop-invariant data (weights shared by all rows, column indices) is read once per program instance instead of once per work item.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from mtmc_lsp.core.protocols import CannotCode

TILE_PROGRAM_IDS = ("pid = tl.program_id(0)", "pid = tl.cast(tl.program_id(0), tl.int64)")
ROW_PROGRAM_ID = "tl.program_id(0).to(tl.int64)"


def loop_over_tiles(lines: Sequence[str], *, flatten: bool) -> list[str]:
    """The body of a matmul kernel, wrapped in a loop over tiles; ``flatten`` joins it with the loop over K inside it."""
    program_id = next((line.removeprefix("pid = ") for line in lines if line in TILE_PROGRAM_IDS), None)
    if program_id is None:
        raise CannotCode("stream-K kernels are persistent already; set persist to 0")
    shared: list[str] = []
    rest: list[str] = []
    comments: list[str] = []
    for line in lines:
        if line in TILE_PROGRAM_IDS:
            shared += comments
        elif line.startswith("#"):
            comments.append(line)
            continue
        else:
            is_shared = re.match(r"(blocks_[mn]|batch) = |\w+ = tl\.make_tensor_descriptor", line) is not None
            (shared if is_shared else rest).extend([*comments, line])
        comments = []
    bounds = f"{program_id}, blocks_m * blocks_n, tl.num_programs(0)"
    loop = f"for pid in tl.range({bounds}, flatten=True):" if flatten else f"for pid in range({bounds}):"
    return [*shared, loop, *(f"    {line}" for line in rest)]


def loop_over_work_items(lines: Sequence[str], pieces: str, *, holds_loads: bool = True, stages: int = 1) -> list[str]:
    """The body of a tile kernel, wrapped in a loop over ``pieces`` work items; its first line sets the row or column index.

    Loop-invariant statements move in front of the loop. This is safe because a kernel never writes a buffer that it reads.

    Args:
        holds_loads: whether loads move, too; their values then stay in registers.
        stages: work items in flight, of which all but one are loaded ahead; with 1, the compiler decides.
    """
    first, *rest = lines
    name, _, index = first.partition(" = ")
    head: list[str] = []
    if index != ROW_PROGRAM_ID:
        head = [first.replace(ROW_PROGRAM_ID, "group")]
    bounds = f"{ROW_PROGRAM_ID}, {pieces}, tl.num_programs(0)"
    items = f"tl.range({bounds}, num_stages={stages})" if stages > 1 else f"range({bounds})"
    loop = f"for {'group' if head else name} in {items}:"
    before, inside = hoist_invariants(rest, {name, "group"}, loads=holds_loads)
    return [*before, loop, *(f"    {line}" for line in [*head, *inside])]


def hoist_invariants(lines: Sequence[str], varying: set[str], *, loads: bool = True) -> tuple[list[str], list[str]]:
    """Split statements into those that do not depend on ``varying`` names, and the rest; loops stay together."""
    counts = Counter(name for line in lines for name in _assigned(line))
    before: list[str] = []
    inside: list[str] = []
    for line in lines:
        assigned = re.match(r"(\w+) = ", line)
        is_single_assignment = assigned is not None and counts[assigned[1]] == 1
        is_single_assignment &= loads or "tl.load(" not in line
        if is_single_assignment and not varying & set(re.findall(r"[A-Za-z_]\w*", line)):
            before.append(line)
            continue
        inside.append(line)
        varying.update(_assigned(line))
    return before, inside


def loads_first(lines: Sequence[str]) -> list[str]:
    """Move loads that depend on no other statement to the front, so that barriers of reductions do not delay them."""
    loads: list[str] = []
    others: list[str] = []
    assigned: set[str] = set()
    for line in lines:
        is_load = re.match(r"\w+ = tl\.load\(", line) and not assigned & set(re.findall(r"[A-Za-z_]\w*", line))
        (loads if is_load else others).append(line)
        assigned.update([] if is_load else _assigned(line))
    return [*loads, *others]


def _assigned(line: str) -> list[str]:
    """The variables that a statement assigns to."""
    match = re.match(r"\s*(\w+(?:, \w+)*) [-+*]?= ", line)
    return match[1].split(", ") if match else []
