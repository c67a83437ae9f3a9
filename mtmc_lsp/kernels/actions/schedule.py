"""*Grouped order* of a product's programs, *pipeline* of loads in loops, and *cache* policies of loads."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tree_sitter import Node

from mtmc_lsp.kernels.actions.base import Facts, Proposal, after, assignment_of, language_of, loops_of
from mtmc_lsp.kernels.actions.numbers import trips
from mtmc_lsp.kernels.repairs.site import Edit, appended
from mtmc_lsp.source.lint.kernel import argument
from mtmc_lsp.source.syntax import field, line_of, text_of, walk

GROUP = 8
"""Rows of tiles in a group, as in Triton's own matrix product."""
STAGES = (2, 3, 4)
LEAST_TRIPS = 4.0
HIDDEN = 0.15
"""Share of a loop's memory time that loading ahead is estimated to hide."""
REREAD = 4.0
"""A tensor is kept in the cache if each element is read this often."""
LEAST_CACHED_BYTES = 1 << 20


def grouped_order(facts: Facts) -> Iterator[Proposal]:
    """Programs of a product in groups of rows, so that programs that run together share operands in the L2 cache.

    Legal because the new numbers are a permutation of the old ones. For a grid of one dimension that needs the grid to be
    the product of both counts.
    """
    site = facts.site
    if not any(name == "dot" for name, _ in site.kernel.calls) or re.search(
        rb"(?i)group_?(size_?)?_?m\b|swizzle", site.text
    ):
        return
    edit = _of_two_dimensions(facts) or _of_one_dimension(facts)
    if edit is None:
        return
    reread = facts.moved - facts.least_bytes
    if facts.least_bytes < facts.device.l2_bytes and not facts.has_gpu:
        return
    yield Proposal(
        "grouped-order",
        facts.name,
        f"Order the programs in groups of {GROUP} rows of tiles",
        (edit,),
        site.text.count(b"\n", 0, edit.start),
        f"programs read {reread / 1e6:.1f} MB more than the operands have, and neighbours share only one operand",
        0.5 * (facts.memory_us(reread) - facts.cache_us(reread)),
        facts.moved,
        facts.least_bytes,
        needs_timing=facts.least_bytes < facts.device.l2_bytes,
    )


def _of_two_dimensions(facts: Facts) -> Edit | None:
    names: dict[str, tuple[str, Node]] = {}
    for statement in facts.site.kernel.body.named_children:
        pair = assignment_of(statement)
        if pair is None or pair[1].type != "call":
            continue
        if facts.site.kernel.triton_name(field(pair[1], "function")) == "program_id":
            axis = text_of(argument(pair[1], 0, "axis"))
            names[axis] = (text_of(pair[0]), statement)
    calls = sum(name == "program_id" for name, _ in facts.site.kernel.calls)
    if names.keys() != {"0", "1"} or calls != 2:
        return None
    (first, one), (second, other) = names["0"], names["1"]
    if any(len(facts.site.kernel.values.get(name, ())) != 1 for name in (first, second)):
        return None
    last = max(one, other, key=lambda node: node.start_byte)
    prefix = language_of(facts)
    sizes = f"{prefix}.num_programs(1), {prefix}.num_programs(0)"
    # Programs of the first dimension start first, so it is the inner one.
    return after(facts.site.text, last, f"{second}, {first} = {prefix}.swizzle2d({second}, {first}, {sizes}, {GROUP})")


def _of_one_dimension(facts: Facts) -> Edit | None:
    """``pid_m = pid // num_n`` and ``pid_n = pid % num_n``."""
    quotients: dict[tuple[str, str], tuple[str, Node]] = {}
    remainders: dict[tuple[str, str], tuple[str, Node]] = {}
    kernel = facts.site.kernel
    for statement in kernel.body.named_children:
        pair = assignment_of(statement)
        if pair is None or pair[1].type != "binary_operator":
            continue
        left, right = field(pair[1], "left"), field(pair[1], "right")
        operator = text_of(field(pair[1], "operator"))
        if left is None or right is None or {left.type, right.type} != {"identifier"}:
            continue
        values = kernel.values.get(text_of(left), ())
        if len(values) != 1 or kernel.triton_name(field(values[0], "function")) != "program_id":
            continue
        table = {"//": quotients, "%": remainders}.get(operator)
        if table is not None:
            table[text_of(left), text_of(right)] = (text_of(pair[0]), statement)
    both = quotients.keys() & remainders.keys()
    calls = sum(name == "program_id" for name, _ in kernel.calls)
    if len(both) != 1 or calls != 1 or not _has_product_grid(facts):
        return None
    key = next(iter(both))
    (row, one), (column, other) = quotients[key], remainders[key]
    if any(len(kernel.values.get(name, ())) != 1 for name in (row, column)):
        return None
    last = max(one, other, key=lambda node: node.start_byte)
    prefix = language_of(facts)
    sizes = f"{prefix}.num_programs(0) // {key[1]}, {key[1]}"
    return after(facts.site.text, last, f"{row}, {column} = {prefix}.swizzle2d({row}, {column}, {sizes}, {GROUP})")


def _has_product_grid(facts: Facts) -> bool:
    return bool(facts.site.launches) and all("*" in text_of(launch.grid) for launch in facts.site.launches)


def pipeline(facts: Facts) -> Iterator[Proposal]:
    """Loops whose loads of later iterations may start while earlier ones are computed. Exact; only a measurement can judge."""
    site = facts.site
    for loop in loops_of(site):
        steps = field(loop, "right")
        inner = [node for node in walk(loop) if node.type == "for_statement" and node != loop]
        function = field(steps, "function")
        if steps is None or function is None or inner or text_of(function) not in ("range", "tl.range"):
            continue
        if argument(steps, 9, "num_stages") is not None:
            continue
        loads = [c for n, c in site.accesses if n == "load" and loop.start_byte <= c.start_byte < loop.end_byte]
        count = trips(loop, facts)
        if not loads or (count is not None and count < LEAST_TRIPS):
            continue
        for stages in STAGES:
            name = f"{language_of(facts)}.range"
            renamed = [] if text_of(function) == name else [Edit(function.start_byte, function.end_byte, name)]
            yield Proposal(
                "pipeline",
                facts.name,
                f"Load ahead in the loop over {text_of(field(loop, 'left'))}, {stages} stages",
                (*renamed, appended(steps, f"num_stages={stages}")),
                line_of(loop),
                f"{len(loads)} loads of each iteration wait for memory",
                HIDDEN * facts.memory_us(facts.least_bytes),
                needs_timing=True,
            )


def cache_policies(facts: Facts) -> Iterator[Proposal]:
    """Policies that keep reread tensors in the cache, and let tensors that are read once leave it first. Exact."""
    read: dict[str, int] = {}
    for access in facts.accesses:
        if access.operation == "load":
            read[access.tensor] = read.get(access.tensor, 0) + access.bytes
    sizes = {access.tensor: access.tensor_bytes for access in facts.accesses}
    kept = {t for t, moved in read.items() if sizes[t] and moved >= REREAD * sizes[t]}
    once = {t for t, moved in read.items() if sizes[t] >= LEAST_CACHED_BYTES and moved <= sizes[t]}
    once -= facts.stored
    edits, lines = [], []
    for name, call in facts.site.accesses:
        seen = facts.access_at(call)
        if name != "load" or seen is None or argument(call, 9, "eviction_policy") is not None:
            continue
        policy = "evict_last" if seen.tensor in kept else "evict_first" if seen.tensor in once else ""
        if policy:
            edits.append(appended(call, f'eviction_policy="{policy}"'))
            lines.append(line_of(call))
    if edits and kept and once:
        reread = float(sum(read[tensor] - sizes[tensor] for tensor in kept))
        yield Proposal(
            "cache",
            facts.name,
            f"Keep {', '.join(sorted(kept))} in the cache, and let {', '.join(sorted(once))} leave it first",
            tuple(edits),
            lines[0],
            f"{', '.join(sorted(kept))} is read at least {REREAD:.0f} times, {', '.join(sorted(once))} once",
            0.1 * (facts.memory_us(reread) - facts.cache_us(reread)),
            needs_timing=True,
        )
