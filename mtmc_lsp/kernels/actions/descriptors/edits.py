"""*Descriptors* in place of block pointers: on Hopper, hardware copies the tiles (Tensor Memory Accelerator).

A constant ``ALIGNED``, which ``@triton.heuristics`` derives at each launch, tells whether descriptors can describe the tensors.
The block pointers stay for all other tensors.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence

from tree_sitter import Node

from mtmc_lsp.kernels.actions.base import Facts, Proposal, before, indent_at, language_of
from mtmc_lsp.kernels.actions.descriptors.conditions import conditions_of, joined
from mtmc_lsp.kernels.actions.descriptors.tiles import Tile, block_tile, contains, is_read_in_loop, outermost_loop
from mtmc_lsp.kernels.actions.signatures import (
    annotation,
    can_have_heuristics,
    decorated,
    module_prefix,
    with_parameter,
)
from mtmc_lsp.kernels.repairs.site import Edit, Launch, replaced
from mtmc_lsp.source.lint.kernel import argument
from mtmc_lsp.source.syntax import line_of, line_start, text_of

CONSTANT = "ALIGNED"
FIRST_VERSION = (3, 4)
"""Version of Triton with ``tl.make_tensor_descriptor``."""
HIDDEN = 0.1
"""Share of a kernel's memory time that is estimated to be saved."""
ALLOCATOR = 'lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda")'


def descriptors(facts: Facts) -> Iterator[Proposal]:
    """Descriptors of the tensors that loops read by block pointers.

    Legal if a block pointer is used for loads and stores of whole tiles alone, its tensor, shape and strides do not change in the
    loop, and a descriptor exists for each tensor at which ``ALIGNED`` holds: the last stride is 1; the address, other strides,
    each start and the places of tiles in a row are multiples of 16; and a row of a tile has 16 bytes. Elements outside the shape
    read as zero, as before.
    """
    site = facts.site
    taken = {*site.kernel.parameters, *site.kernel.values}
    if not facts.device.has_tma or facts.triton < FIRST_VERSION or CONSTANT in taken:
        return
    if b"import torch\n" not in site.text or module_prefix(facts) != "triton":
        return
    tiles = [tile for name in sorted(site.kernel.values) if (tile := block_tile(facts, name)) is not None]
    known = {tile.name: found for tile in tiles if (found := conditions_of(facts, tile)) is not None}
    tiles = [tile for tile in tiles if tile.name in known and is_read_in_loop(facts, tile)]
    if not tiles:
        return
    conditions = joined([known[tile.name] for tile in tiles])
    needed = sorted(set(re.findall(r'"(\w+)"', " ".join(conditions))))
    parameter = with_parameter(facts, f"{CONSTANT}: {annotation(facts)}")
    lines = [f"    {'and ' if number else ''}{condition}" for number, condition in enumerate(conditions)]
    rule = [f'@triton.heuristics({{"{CONSTANT}": lambda args: (', *lines, ")})"]
    decorator = decorated(facts, rule)
    if parameter is None or decorator is None or not can_have_heuristics(facts, needed):
        return
    edits = [*_edits(facts, tiles)]
    allocators = [] if b"set_allocator" in site.text else [_allocator(site.text, launch) for launch in site.launches]
    names = ", ".join(tile.name for tile in tiles)
    yield Proposal(
        "descriptors",
        facts.name,
        f"Copy the tiles of {names} by descriptors",
        (decorator, parameter, *edits, *{edit.start: edit for edit in allocators}.values()),
        line_of(tiles[0].creation),
        f"loops read {names} tile by tile, and threads compute the address of each element",
        HIDDEN * facts.memory_us(facts.least_bytes),
        needs_timing=True,
        condition=CONSTANT,
    )


def _edits(facts: Facts, tiles: Sequence[Tile]) -> Iterator[Edit]:
    """The edits of block pointers and of their uses."""
    text, prefix = facts.site.text, language_of(facts)
    above: dict[int, tuple[Node, list[str]]] = {}
    branches: list[tuple[Node, list[str]]] = []
    for tile in tiles:
        made = [f"{tile.name} = {_descriptor(tile, prefix)}"]
        made += [f"{tile.variable(i)} = {text_of(tile.offsets[i])}" for i in (0, 1) if tile.moves(i)]
        outer = outermost_loop(facts, tile)
        if outer is not None:
            above.setdefault(outer.start_byte, (outer, []))[1].extend(made)
        branches.append((tile.creation, made if outer is None else []))
        for statement, *steps in tile.advances:
            moved = [f"{tile.variable(i)} += {text_of(step)}" for i, step in enumerate(steps) if text_of(step) != "0"]
            branches.append((statement, moved))
        branches += [(store, [_stored(tile, store, prefix)]) for store in tile.stores]
        yield from (_read(tile, load, prefix) for load in tile.loads)
        for node in tile.types:
            if not any(contains(store, node) for store in tile.stores):
                yield replaced(node, f"{tile.pointer}.dtype")
    for loop, lines in above.values():
        start, indent = line_start(text, loop.start_byte), indent_at(text, loop)
        yield Edit(start, start, f"{indent}if {CONSTANT}:\n" + "".join(f"{indent}    {line}\n" for line in lines))
    yield from _branched(text, sorted(branches, key=lambda branch: branch[0].start_byte))


def _read(tile: Tile, load: Node, prefix: str) -> Edit:
    """The edit of a load."""
    read = f"{tile.name}.load({tile.place})"
    read = f"{prefix}.trans({read})" if tile.is_swapped else read
    new = f"{read} if {CONSTANT} else {text_of(load)}"
    is_alone = load.parent is not None and load.parent.type == "assignment"
    return replaced(load, new if is_alone else f"({new})")


def _stored(tile: Tile, store: Node, prefix: str) -> str:
    """The store of a tile by its descriptor."""
    value = text_of(argument(store.named_children[0], 1, "value")).replace(
        f"{tile.name}.dtype", f"{tile.pointer}.dtype"
    )
    return f"{tile.name}.store({tile.place}, {f'{prefix}.trans({value})' if tile.is_swapped else value})"


def _descriptor(tile: Tile, prefix: str) -> str:
    shape, block = (tile.ordered([text_of(item) for item in pair]) for pair in (tile.shape, tile.block))
    stride = text_of(tile.strides[1 if tile.is_swapped else 0])
    inner = f"shape=[{shape}], strides=[{stride}, 1], block_shape=[{block}]"
    return f"{prefix}.make_tensor_descriptor({text_of(tile.base)}, {inner})"


def _branched(text: bytes, branches: Sequence[tuple[Node, list[str]]]) -> Iterator[Edit]:
    """Edits that run other lines in place of statements where descriptors are used; neighbours share a condition."""
    left = [*branches]
    while left:
        group = [left.pop(0)]
        while left and not text[group[-1][0].end_byte : left[0][0].start_byte].strip():
            group.append(left.pop(0))
        indent = indent_at(text, group[0][0])
        lines = [line for _, added in group for line in added]
        new = [f"if {CONSTANT}:", *(f"{indent}    {line}" for line in lines), f"{indent}else:"]
        new = new if lines else [f"if not {CONSTANT}:"]
        new += [f"{indent}    {textwrap.indent(text_of(statement), '    ').lstrip()}" for statement, _ in group]
        yield Edit(group[0][0].start_byte, group[-1][0].end_byte, "\n".join(new))


def _allocator(text: bytes, launch: Launch) -> Edit:
    """The line above a launch that provides memory for descriptors."""
    statement = launch.call
    while statement.parent is not None and statement.parent.type not in ("block", "module"):
        statement = statement.parent
    return before(text, statement, f"triton.set_allocator({ALLOCATOR})")
