"""*Autotune*: ``@triton.autotune`` with a few configurations, and launches without the values that it chooses now."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from mtmc_lsp.kernels.actions.base import Facts, Proposal
from mtmc_lsp.kernels.actions.signatures import (
    decorated,
    has_unknown_keywords,
    has_unknown_positions,
    is_called,
    module_prefix,
)
from mtmc_lsp.kernels.actions.tuning.blocks import Block, free_blocks, program_counters
from mtmc_lsp.kernels.actions.tuning.configuration import EXPECTED, ONLY, OPTIONS, Configuration
from mtmc_lsp.kernels.actions.tuning.extend import more_configurations
from mtmc_lsp.kernels.actions.tuning.pruning import THREADS, is_spread, stages_matter
from mtmc_lsp.kernels.actions.tuning.tiles import is_product
from mtmc_lsp.kernels.repairs.site import Edit, Launch
from mtmc_lsp.source.lint.kernel import argument
from mtmc_lsp.source.syntax import field, line_end, line_of, line_start, text_of

WARPS = (1, 2, 4, 8, 16, 32)
STAGES = (2, 3, 4, 5)
FIRST_WITH_CACHE = (3, 4)
"""Version of Triton whose autotuner can store results on disk."""
LEAST_BLOCK, LARGEST_BLOCK = 16, 8192
USUAL_BLOCKS = (256, 1024)
"""Block sizes of elementwise kernels that are tried in place of smaller ones."""
LARGEST_TILE = 256
"""Largest block of a dimension of a product."""
ROW_OF_A_WARP = 512
"""Elements of a row for each warp that is tried: a block may contain a whole row."""
TILES = ((128, 128, 4), (128, 256, 8), (64, 128, 4), (64, 64, 4))
"""Rows, columns and warps of tiles that are usual for products."""
ROW_BITS = 1024
"""Bits that a tile reads of each row: 64 elements of 16 bits."""
BITS = re.compile(r"^\*[a-z]+(\d+)")
"""The width of a pointer's elements in its type, as ``*fp16``."""
MOST_OTHER_SIZES = 4
"""Most sets of block sizes besides the present one."""


def autotune(facts: Facts) -> Iterator[Proposal]:
    """Warps, stages and block sizes that the autotuner measures.

    Legal if the kernel has no autotuner, each launch is in the file, and running the kernel several times is harmless: what it
    reads and writes is restored between runs. A block size may change if each of its blocks starts at a multiple of it and all
    accesses are masked, so that results do not depend on it.
    """
    site, prefix = facts.site, module_prefix(facts)
    if facts.is_tuned:
        yield from more_configurations(facts)
        return
    if not prefix or not site.launches or is_called(facts) or not facts.launches:
        return
    if any(has_unknown_keywords(launch) or _has_other_options(launch) for launch in site.launches) or _is_used_by_name(
        facts
    ):
        return
    blocks = free_blocks(facts)
    whole = _tuned(facts, prefix, blocks)
    if whole is not None:
        yield whole
    fixed = _tuned(facts, prefix, []) if whole is not None and blocks else None
    if whole is not None and fixed is not None:
        # The interpreter may not end in time with smaller blocks.
        yield replace(fixed, fallback_for=whole.title)


def _tuned(facts: Facts, prefix: str, blocks: Sequence[Block]) -> Proposal | None:
    """The kernel with an autotuner that chooses warps, stages and some block sizes; None if that is not possible."""
    site = facts.site
    current = Configuration(
        tuple((block.name, block.size) for block in blocks),
        facts.launches[0].launch.num_warps,
        facts.launches[0].launch.num_stages,
    )
    configurations = _configurations(facts, current)
    removed = [edit for launch in site.launches for edit in _without(launch, facts, [block.name for block in blocks])]
    grids = {edit.start: edit for block in blocks for edit in block.grids}
    is_updated = _updates_tensors(facts)
    restored = [
        name for name in site.kernel.parameters if name in facts.stored and (is_updated or _is_read(facts, name))
    ]
    if any(name in work.numbers for work in facts.launches for name in restored):
        # A launch passes 0 in place of a tensor, which the autotuner cannot copy.
        return None
    head = decorated(facts, _decorator(facts, prefix, configurations, restored), is_outer=True)
    if head is None or len(configurations) < 2:
        return None
    if any(b"#" in site.text[edit.start : edit.end] for edit in removed):
        # A comment of the author is between the arguments.
        return None
    sizes = f" and the size of {', '.join(block.name for block in blocks)}" if blocks else ""
    return Proposal(
        "autotune",
        facts.name,
        f"Tune warps, stages{sizes} by {len(configurations)} configurations",
        (head, *removed, *grids.values()),
        line_of(site.kernel.node),
        f"every launch uses {current.warps} warps and {current.stages} stages, which were never measured on this GPU",
        EXPECTED * facts.bound_us,
    )


def alternatives(proposal: Proposal, text: bytes) -> list[bytes]:
    """The texts in which each configuration of an autotuner is the first one, which the interpreter runs."""
    head = proposal.edits[0]
    lines = head.new.splitlines(keepends=True)
    places = [i for i, line in enumerate(lines) if ".Config(" in line]
    if not head.new.lstrip().startswith("@"):
        # Further configurations of the author's autotuner keep the constants of a present one.
        return []
    seen, texts = set(), []
    for place in places:
        blocks = re.sub(r"num_\w+=\d+,? ?", "", lines[place])
        if blocks in seen:
            # Warps and stages mean nothing to the interpreter.
            continue
        seen.add(blocks)
        order = [lines[place], *(lines[i] for i in places if i != place)]
        changed = [*lines[: places[0]], *order, *lines[places[-1] + 1 :]]
        edits = (replace(head, new="".join(changed)), *proposal.edits[1:])
        texts.append(replace(proposal, edits=edits).applied(text))
    return texts[1:]


def _decorator(
    facts: Facts, prefix: str, configurations: Sequence[Configuration], restored: Sequence[str]
) -> list[str]:
    key = ", ".join(f'"{name}"' for name in _key(facts))
    return [
        f"@{prefix}.autotune(",
        "    configs=[",
        *(f"        {item.text(prefix)}," for item in configurations),
        "    ],",
        f"    key=[{key}],",
        *(
            [f"    restore_value=[{', '.join(repr(n).replace(chr(39), chr(34)) for n in restored)}],"]
            if restored
            else []
        ),
        *(["    cache_results=True,"] if facts.triton >= FIRST_WITH_CACHE else []),
        ")",
    ]


def _key(facts: Facts) -> list[str]:
    """Integer parameters that are sizes: the best configuration depends on them."""
    kernel = facts.site.kernel
    names = [name for work in facts.launches for name in work.numbers]
    return [
        name
        for name in kernel.parameters
        if name in names and "stride" not in name.lower() and not kernel.parameters[name].is_constexpr
    ]


def _updates_tensors(facts: Facts) -> bool:
    """Whether the kernel reads a tensor that it writes, perhaps by two parameters; its name may be that of another launch."""
    return any(
        write.operation != "load" and write.tensor == read.tensor and read.operation != "store"
        for write in facts.accesses
        for read in facts.accesses
    )


def _is_read(facts: Facts, name: str) -> bool:
    """Whether the kernel reads a tensor that it writes, also by atomic operations, or another parameter that may be the same."""
    return any(access.tensor == name and access.operation != "store" for access in facts.accesses) or any(
        call_name.startswith("atomic") or call_name == "load"
        for call_name, call in facts.site.kernel.calls
        if (pointer := argument(call, 0, "pointer")) is not None and name in facts.site.bases(pointer)
    )


def _configurations(facts: Facts, current: Configuration) -> list[Configuration]:
    """The present configuration first, then those with other blocks, warps and stages, pruned to sensible ones."""
    has_product = any(name == "dot" for name, _ in facts.site.kernel.calls)
    stages = tuple(STAGES) if has_product else (2, 4)
    stages = stages if stages_matter(facts) else (current.stages,)
    if tiles := _tiles(facts, current):
        others = [replace(current, warps=warps, stages=stages) for warps in (4, 8) for stages in (3, 4)]
        return list(dict.fromkeys([current, *tiles, *others]))[: facts.most_configs]
    ends = {text_of(argument(call, 1, "end")) for name, call in facts.site.kernel.calls if name == "arange"}
    row = max((value for name, value in facts.constants.items() if name in ends and isinstance(value, int)), default=0)
    sizes = [dict(current.blocks)]
    for name, size in current.blocks:
        usual = [other for other in USUAL_BLOCKS if other > 4 * size and len(current.blocks) == 1 and not has_product]
        more = [] if len(current.blocks) > 1 else [4 * size, *usual]
        for other in (2 * size, size // 2, *more):
            if LEAST_BLOCK <= other <= (LARGEST_TILE if has_product else LARGEST_BLOCK):
                sizes.append({**dict(current.blocks), name: other})
    # The interpreter runs each of them on all cases.
    sizes = sizes[: 1 + MOST_OTHER_SIZES]
    found = [current]
    for blocks in sizes:
        lanes = 1
        for size in blocks.values():
            lanes *= size
        for warps in WARPS:
            # At least one, and at most 64 elements for each thread of a block.
            if blocks and not has_product and not THREADS * warps <= lanes <= 64 * THREADS * warps:
                continue
            near = current.warps / 2 <= warps <= max(current.warps * 4, row // ROW_OF_A_WARP)
            if near and is_spread(facts, blocks, warps, current.warps):
                found += [Configuration(tuple(blocks.items()), warps, count) for count in stages]
    unique = list(dict.fromkeys(found))
    most = facts.most_configs
    if len(unique) > most:
        # Every kind of change stays represented.
        step = (len(unique) - 1) / (most - 1)
        unique = [unique[round(i * step)] for i in range(most)]
    return unique


def _tiles(facts: Facts, current: Configuration) -> list[Configuration]:
    """Usual tiles of a product whose blocks may all change; empty for other kernels."""
    inner = [name for name, _ in current.blocks if not program_counters(facts, name)]
    outer = [name for name, _ in current.blocks if name not in inner]
    if not is_product(facts) or len(inner) > 1 or len(outer) != 2:
        return []
    bits = [
        int(found[0]) for work in facts.launches for t in work.launch.signature.values() if (found := BITS.findall(t))
    ]
    depth = ROW_BITS // max(bits, default=16)
    return [
        Configuration(
            tuple(
                (name, depth if name in inner else rows if name == outer[0] else columns) for name, _ in current.blocks
            ),
            warps,
            stages,
        )
        for rows, columns, warps in TILES
        for stages in (3, 4)
    ]


def _is_used_by_name(facts: Facts) -> bool:
    """Whether the file uses the kernel object itself: ``kernel.warmup(...)``, ``kernel.cache``."""
    return re.search(rf"\b{re.escape(facts.name)}\.\w", facts.site.text.decode(errors="replace")) is not None


def _has_other_options(launch: Launch) -> bool:
    """Whether the launch sets an option that the configurations would set to another value."""
    return any(name in launch.keywords and text_of(launch.keywords[name]) != text for name, text in ONLY.items())


def _without(launch: Launch, facts: Facts, blocks: Sequence[str]) -> Iterator[Edit]:
    """The edits that remove what a configuration sets now: from the argument to the end of the one before."""
    arguments = field(launch.call, "arguments")
    items = [item for item in arguments.named_children if item.type != "comment"] if arguments is not None else []
    positional = [] if has_unknown_positions(launch) else launch.positional
    names = {node.id: name for name, node in zip(facts.site.kernel.parameters, positional, strict=False)}
    gone = [
        item
        for item in items
        if (item.type == "keyword_argument" and text_of(field(item, "name")) in (*OPTIONS, *ONLY, *blocks))
        or (item.type != "keyword_argument" and names.get(item.id) in blocks)
    ]
    for item in gone:
        position = items.index(item)
        source = facts.site.text
        if position:
            previous = items[position - 1]
            start, end = line_start(source, item.start_byte), line_end(source, item.end_byte)
            is_alone = source[start:end].strip().rstrip(b",") == text_of(item).encode()
            if previous not in gone and is_alone and b"#" in source[previous.end_byte : start]:
                # The comment belongs to the argument before.
                yield Edit(start, end, "")
            else:
                yield Edit(previous.end_byte, item.end_byte, "")
        else:
            end = source.find(b",", item.end_byte, arguments.end_byte if arguments is not None else None)
            yield Edit(item.start_byte, end + 1 if end >= 0 else item.end_byte, "")
