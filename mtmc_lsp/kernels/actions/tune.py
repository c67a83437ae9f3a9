"""*Autotune*: ``@triton.autotune`` with a few configurations, and launches without the values that it chooses now."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tree_sitter import Node

from mtmc_lsp.kernels.actions.base import Facts, Proposal
from mtmc_lsp.kernels.actions.offsets import block_offsets, loop_steps
from mtmc_lsp.kernels.actions.signatures import decorated, is_called, is_splatted, module_prefix
from mtmc_lsp.kernels.repairs.site import Edit, Launch, replaced
from mtmc_lsp.source.lint.kernel import argument
from mtmc_lsp.source.lint.linear import linear
from mtmc_lsp.source.syntax import field, line_of, text_of, walk

OPTIONS = {"num_warps": 4, "num_stages": 3}
WARPS = (1, 2, 4, 8, 16)
STAGES = (2, 3, 4, 5)
THREADS = 32
FIRST_WITH_CACHE = (3, 4)
"""Version of Triton whose autotuner can store results on disk."""
LEAST_BLOCK, LARGEST_BLOCK = 16, 8192
LARGEST_TILE = 256
"""Largest block of a dimension of a product."""
MOST_CONFIGS = 12
EXPECTED = 0.1
"""Estimated share of the time that tuned options save, where the kernel is far from the roofline."""


@dataclass(frozen=True)
class Configuration:
    """One configuration of an autotuner."""

    blocks: tuple[tuple[str, int], ...]
    warps: int
    stages: int

    def text(self, prefix: str) -> str:
        """The configuration as source."""
        blocks = ", ".join(f'"{name}": {size}' for name, size in self.blocks)
        return f"{prefix}.Config({{{blocks}}}, num_warps={self.warps}, num_stages={self.stages})"


@dataclass(frozen=True)
class _Block:
    """A block size that launches pass as a number and that may change."""

    name: str
    size: int
    arguments: tuple[Node, ...]
    """The arguments of the launches."""
    grids: tuple[Edit, ...]
    """Edits that make grids read the size from the configuration."""


def autotune(facts: Facts) -> Iterator[Proposal]:
    """Warps, stages and block sizes that the autotuner measures.

    Legal if the kernel has no autotuner, each launch is in the file, and running the kernel several times is harmless: what it
    reads and writes is restored between runs. A block size may change if each of its blocks starts at a multiple of it and all
    accesses are masked, so that results do not depend on it.
    """
    site, prefix = facts.site, module_prefix(facts)
    if not prefix or not site.launches or is_called(facts) or facts.is_tuned or not facts.launches:
        return
    if any(is_splatted(launch) for launch in site.launches) or _is_used_by_name(facts):
        return
    blocks = [block for name in site.kernel.parameters if (block := _block(facts, name)) is not None]
    current = Configuration(
        tuple((block.name, block.size) for block in blocks),
        facts.launches[0].launch.num_warps,
        facts.launches[0].launch.num_stages,
    )
    configurations = _configurations(facts, current)
    removed = [edit for launch in site.launches for edit in _without(launch, facts, [block.name for block in blocks])]
    grids = {edit.start: edit for block in blocks for edit in block.grids}
    restored = [name for name in site.kernel.parameters if name in facts.stored and _is_read(facts, name)]
    if any(name in work.numbers for work in facts.launches for name in restored):
        # A launch passes 0 in place of a tensor, which the autotuner cannot copy.
        return
    head = decorated(facts, _decorator(facts, prefix, configurations, restored), is_outer=True)
    if head is None or len(configurations) < 2:
        return
    if any(b"#" in site.text[edit.start : edit.end] for edit in removed):
        # A comment of the author is between the arguments.
        return
    sizes = f" and the size of {', '.join(block.name for block in blocks)}" if blocks else ""
    yield Proposal(
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
    has_loop = any(node.type == "for_statement" for node in walk(facts.site.kernel.body))
    sizes = [dict(current.blocks)]
    for name, size in current.blocks:
        for factor in (2, 4, 1 / 2):
            other = int(size * factor)
            largest = LARGEST_TILE if has_product else LARGEST_BLOCK
            if LEAST_BLOCK <= other <= largest:
                sizes.append({**dict(current.blocks), name: other})
    found = [current]
    for blocks in sizes:
        lanes = 1
        for size in blocks.values():
            lanes *= size
        for warps in WARPS:
            # At least one, and at most 64 elements for each thread of a block.
            if blocks and not has_product and not THREADS * warps <= lanes <= 64 * THREADS * warps:
                continue
            near = current.warps / 2 <= warps <= current.warps * 4
            for stages in STAGES if has_product else (2, 4) if has_loop else ():
                if near:
                    found.append(Configuration(tuple(blocks.items()), warps, stages))
            if not has_loop and near:
                found.append(Configuration(tuple(blocks.items()), warps, current.stages))
    unique = list(dict.fromkeys(found))
    if len(unique) > MOST_CONFIGS:
        # Every kind of change stays represented.
        step = (len(unique) - 1) / (MOST_CONFIGS - 1)
        unique = [unique[round(i * step)] for i in range(MOST_CONFIGS)]
    return unique


def _is_used_by_name(facts: Facts) -> bool:
    """Whether the file uses the kernel object itself: ``kernel.warmup(...)``, ``kernel.cache``."""
    return re.search(rf"\b{re.escape(facts.name)}\.\w", facts.site.text.decode(errors="replace")) is not None


def _without(launch: Launch, facts: Facts, blocks: Sequence[str]) -> Iterator[Edit]:
    """The edits that remove what a configuration sets now: from the argument to the end of the one before."""
    arguments = field(launch.call, "arguments")
    items = [item for item in arguments.named_children if item.type != "comment"] if arguments is not None else []
    gone = [
        item
        for item in items
        if item.type == "keyword_argument" and text_of(field(item, "name")) in (*OPTIONS, *blocks)
    ]
    for item in gone:
        position = items.index(item)
        source = facts.site.text
        if position:
            previous = items[position - 1]
            yield Edit(previous.end_byte, item.end_byte, "")
        else:
            end = source.find(b",", item.end_byte, arguments.end_byte if arguments is not None else None)
            yield Edit(item.start_byte, end + 1 if end >= 0 else item.end_byte, "")


def _block(facts: Facts, name: str) -> _Block | None:
    """The block size of a parameter if it may change: a number at each launch by keyword, and used nowhere else but in grids."""
    kernel = facts.site.kernel
    if not kernel.parameters[name].is_constexpr or not _is_free(facts, name):
        return None
    sizes: set[int] = set()
    arguments: list[Node] = []
    grids: list[Edit] = []
    for launch in facts.site.launches:
        value = launch.keywords.get(name)
        if value is None:
            return None
        local = text_of(value) if value.type == "identifier" else ""
        values = launch.values.get(local, [])
        number = values[0] if len(values) == 1 else value
        if number.type != "integer":
            return None
        if not local and [text_of(item) for item in launch.keywords.values()].count(text_of(value)) > 1:
            # The grid does not tell which of them it divides by.
            return None
        others = [item for item in launch.positional + list(launch.keywords.values()) if item != value]
        if any(text_of(node) == text_of(value) for item in others if item.type == "call" for node in walk(item)):
            # Another argument depends on the block size: the number of blocks.
            return None
        edits = _grid_edits(launch, name, local or text_of(value), is_name=bool(local))
        if edits is None:
            return None
        sizes.add(int(text_of(number), 0))
        arguments.append(value)
        grids += edits
    size = sizes.pop() if len(sizes) == 1 else 0
    return _Block(name, size, tuple(arguments), tuple(grids)) if size and not size & (size - 1) else None


def _is_free(facts: Facts, name: str) -> bool:
    """Whether the results do not depend on a block size: each block starts at a multiple of it, and each access is masked."""
    site = facts.site
    aranges = [c for n, c in site.kernel.calls if n == "arange" and name in text_of(c)]
    stepped = {
        steps.block
        for node in walk(site.kernel.body)
        if node.type == "for_statement" and (steps := loop_steps(node, site))
    }
    if not aranges or not all(_is_bounded(facts, name, call) for name, call in site.accesses):
        return False
    for call in aranges:
        if text_of(argument(call, 1, "end")) != name:
            return False
        if name in stepped:
            continue
        expressions = [v for values in site.kernel.values.values() for v in values if _contains(v, call)]
        blocks_of = [block_offsets(terms) for v in expressions if (terms := linear(v, site.kernel)) is not None]
        if not any(offsets is not None and name in offsets.start for offsets in blocks_of):
            return False
    return True


def _is_bounded(facts: Facts, name: str, call: Node) -> bool:
    """Whether an access has a mask, or runs only where blocks divide a length."""
    if argument(call, 1 if name == "load" else 2, "mask") is not None:
        return True
    conditions = facts.site.kernel.enclosing.ancestors(call, "if_statement")
    return any(text_of(field(item, "condition")).startswith("EVEN_") for item in conditions)


def _contains(node: Node, other: Node) -> bool:
    return node.start_byte <= other.start_byte and other.end_byte <= node.end_byte


def _grid_edits(launch: Launch, parameter: str, value: str, *, is_name: bool) -> list[Edit] | None:
    """The edits that make a grid read the block size from the configuration; None if that is not possible."""
    subscript = field(field(launch.call, "function"), "subscript")
    holder = subscript
    if subscript is not None and subscript.type == "identifier":
        values = launch.values.get(text_of(subscript), [])
        holder = values[0] if len(values) == 1 else None
        if holder is None or any(
            text_of(n) == text_of(subscript) and n.type == "identifier"
            for n in walk(launch.function)
            if n.start_byte not in (subscript.start_byte,) and not _is_target(n, launch)
        ):
            return None
    if holder is None or holder.type not in ("tuple", "lambda"):
        return None
    is_lambda = holder.type == "lambda"
    meta = text_of(field(holder, "parameters")) if is_lambda else "META"
    divisors = [
        item
        for node in walk(holder)
        if node.type == "call" and text_of(field(node, "function")).endswith("cdiv")
        for item in [argument(node, 1, "y")]
        if item is not None and text_of(item) == value
    ]
    if is_name:
        inside = [n for n in walk(holder) if n.type == "identifier" and text_of(n) == value]
        elsewhere = [
            n
            for n in walk(launch.function)
            if n.type == "identifier" and text_of(n) == value and not _contains(holder, n)
        ]
        # The assignment and the launch itself; a keyword of the same name is an identifier, too.
        allowed = 3 if value == parameter else 2
        if len(inside) != len(divisors) or len(elsewhere) > allowed:
            return None
    reads = f'{meta}["{parameter}"]' in text_of(holder) or f"{meta}['{parameter}']" in text_of(holder)
    if not divisors:
        return [] if is_lambda and reads else None
    edits = [replaced(item, f'{meta}["{parameter}"]') for item in divisors]
    if is_lambda:
        return edits
    return [Edit(holder.start_byte, holder.start_byte, "lambda META: "), *edits]


def _is_target(node: Node, launch: Launch) -> bool:
    """Whether a name is the target of its assignment."""
    return any(
        field(item, "left") is not None and field(item, "left") == node
        for item in walk(launch.function)
        if item.type == "assignment"
    )
