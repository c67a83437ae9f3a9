"""*Split-k* of a product's inner dimension among programs, and *persist*: programs that compute several blocks."""

from __future__ import annotations

from collections.abc import Iterator

from tree_sitter import Node

from mtmc_lsp.kernels.actions.base import (
    MICROSECONDS,
    Facts,
    Proposal,
    assigned_in,
    assignment_of,
    before,
    loops_of,
    uses,
)
from mtmc_lsp.kernels.actions.fusion.launcher import OneLaunch, is_fresh, occurrences, one_launch, only_accesses
from mtmc_lsp.kernels.actions.numbers import trips
from mtmc_lsp.kernels.actions.offsets import LoopSteps, loop_steps
from mtmc_lsp.kernels.actions.signatures import with_parameter
from mtmc_lsp.kernels.repairs.site import Edit, appended, replaced
from mtmc_lsp.source.lint.kernel import argument
from mtmc_lsp.source.syntax import field, line_end, line_of, line_start, text_of, walk

MOST_SPLITS = 16
LEAST_TRIPS = 4
"""Iterations that each program keeps."""
PROGRAMS_PER_SM, SPREAD = 8, 4
"""Programs of a persistent elementwise kernel on each multiprocessor, and how many blocks each of them computes at least."""
GAIN = 0.05
"""Estimated share of the time that the start of programs takes."""


def split_k(facts: Facts) -> Iterator[Proposal]:
    """A product with few tiles: several programs add up parts of its inner dimension.

    Legal if the kernel does nothing with its float32 sum but store it once, the tensor is new, and one loop over the blocks of
    the inner dimension carries the sum and pointers that grow by the same amount in each iteration. The parts are added in
    any order, which changes rounding.
    """
    one, loops, site = one_launch(facts), loops_of(facts.site), facts.site
    steps = loop_steps(loops[0], site) if len(loops) == 1 else None
    if one is None or steps is None or facts.is_tuned or not any(name == "dot" for name, _ in site.kernel.calls):
        return
    loop, programs, count = loops[0], facts.launches[0].programs, trips(loops[0], facts)
    splits = _splits(facts.device.sm_count, programs, count)
    grid = _grid(one)
    if splits < 2 or grid is None or any(name == "num_programs" for name, _ in site.kernel.calls):
        return
    dimensions = len([item for item in grid.named_children if item.type != "comment"])
    carried = _carried(facts, loop, dimensions) if dimensions < 3 else None
    store = _only_store(facts, one, carried[0]) if carried is not None else None
    if carried is None or store is None:
        return
    language = text_of(field(store[0], "function")).rpartition(".")[0]
    header = _header(loop, steps, dimensions, language)
    function = field(store[0], "function")
    if header is None or function is None or not language:
        return
    busy = min(1.0, programs / facts.device.sm_count)
    yield Proposal(
        "split-k",
        facts.name,
        f"Split the loop over {steps.length} among {splits} programs",
        (
            header,
            *carried[1],
            replaced(function, f"{language}.atomic_add"),
            store[1],
            Edit(_last(grid), grid.end_byte - 1, f", {splits}"),
        ),
        line_of(loop),
        f"{programs} programs run on {facts.device.sm_count} multiprocessors, each of them {count:.0f} iterations",
        MICROSECONDS * facts.operations / facts.device.flops["fp32"] / busy * (1.0 - 1.0 / splits),
        needs_timing=True,
    )


def _splits(processors: int, programs: int, count: float | None) -> int:
    splits = 1
    while (
        2 * splits * programs <= processors and 2 * splits <= MOST_SPLITS and 2 * splits * LEAST_TRIPS <= (count or 0)
    ):
        splits *= 2
    return splits


def _grid(one: OneLaunch) -> Node | None:
    """The tuple of a grid that only this launch uses."""
    grid = one.launch.grid
    subscript = field(field(one.launch.call, "function"), "subscript")
    if subscript is not None and subscript.type == "identifier":
        used = occurrences(one.launch.function, text_of(subscript))
        if len(used) != 2:
            return None
    return grid if grid is not None and grid.type == "tuple" else None


def _last(grid: Node) -> int:
    """Where the last dimension of a grid ends."""
    return [item for item in grid.named_children if item.type != "comment"][-1].end_byte


def _carried(facts: Facts, loop: Node, axis: int) -> tuple[str, list[Edit]] | None:
    """The sum that a loop carries, and the edits of the pointers that it carries; None if it carries anything else."""
    site, body = facts.site, field(loop, "body")
    values = site.kernel.values
    earlier = {name for name, nodes in values.items() if nodes[0].start_byte < loop.start_byte}
    carried, edits, sums = (assigned_in(loop) & (earlier | site.kernel.parameters.keys())), list[Edit](), list[str]()
    language = next((text_of(field(call, "function")).rpartition(".")[0] for _, call in site.kernel.calls), "tl")
    for statement in body.named_children if body is not None else ():
        inner = statement.named_children[0] if statement.type == "expression_statement" else None
        left, right = field(inner, "left"), field(inner, "right")
        if inner is None or left is None or right is None or text_of(left) not in carried:
            continue
        name, is_added = (
            text_of(left),
            inner.type == "augmented_assignment" and text_of(field(inner, "operator")) == "+=",
        )
        carried = carried - {name}
        if any(
            site.kernel.triton_name(field(node, "function")) == "dot" for node in walk(right) if node.type == "call"
        ):
            accumulates = argument(right, 2, "acc") if right.type == "call" else None
            if not is_added and text_of(accumulates) != name:
                return None
            sums.append(name)
        elif is_added and not uses(right) & assigned_in(loop) and site.bases(left):
            factor = text_of(right) if right.type == "identifier" else f"({text_of(right)})"
            edits.append(before(site.text, loop, f"{name} += {language}.program_id({axis}) * {factor}"))
            edits.append(replaced(right, f"{language}.num_programs({axis}) * {factor}"))
        else:
            return None
    if carried or len(sums) != 1 or len(values[sums[0]]) != 2:
        return None
    start = values[sums[0]][0]
    is_zero = start.type == "call" and site.kernel.triton_name(field(start, "function")) == "zeros"
    return (sums[0], edits) if is_zero else None


def _only_store(facts: Facts, one: OneLaunch, total: str) -> tuple[Node, Edit] | None:
    """The store of the sum, and the edit that creates its tensor with zeros."""
    site = facts.site
    stores = [call for name, call in site.accesses if name == "store"]
    value, pointer = (
        (argument(stores[0], 1, "value"), argument(stores[0], 0, "pointer")) if len(stores) == 1 else (None, None)
    )
    parameters = site.bases(pointer) if pointer is not None else []
    if value is None or len(parameters) != 1 or not only_accesses(facts, parameters[0], "store"):
        return None
    uses_of_total = [n for n in walk(site.kernel.body) if n.type == "identifier" and text_of(n) == total]
    node: Node | None = value
    while node is not None and text_of(node) != total:
        values = site.kernel.values.get(text_of(node), ()) if node.type == "identifier" else ()
        function = field(node, "function")
        is_cast = (
            function is not None and function.type == "attribute" and text_of(field(function, "attribute")) == "to"
        )
        node = values[0] if len(values) == 1 else field(function, "object") if is_cast else None
    after = [item for item in uses_of_total if item.start_byte > loops_of(site)[0].end_byte]
    kinds = {work.launch.signature.get(parameters[0], "") for work in facts.launches}
    options = {text_of(field(i, "name")) for i in walk(stores[0]) if i.type == "keyword_argument"}
    tensor = one.passed.get(parameters[0])
    if node is None or len(after) != 1 or kinds != {"*fp32"} or options - {"mask"} or tensor is None:
        return None
    created = is_fresh(one, text_of(tensor)) if tensor.type == "identifier" else None
    function = field(created, "function")
    if created is None or function is None or one.is_shared(parameters[0]):
        return None
    return stores[0], replaced(function, text_of(function).replace("empty", "zeros"))


def _header(loop: Node, steps: LoopSteps, axis: int, language: str) -> Edit | None:
    """The edit of a loop's range: each program takes every n-th block."""
    right = field(loop, "right")
    arguments = field(right, "arguments")
    if arguments is None or any(item.type == "keyword_argument" for item in arguments.named_children):
        return None
    first, step = f"{language}.program_id({axis})", f"{language}.num_programs({axis})"
    if steps.counts_blocks:
        items = [item for item in arguments.named_children if item.type != "comment"]
        return replaced(arguments, f"({first}, {text_of(items[-1])}, {step})")
    return replaced(arguments, f"({first} * {steps.block}, {steps.length}, {steps.block} * {step})")


# Persist -------------------------------------------------------------------------------------------------------------


def persist(facts: Facts) -> Iterator[Proposal]:
    """A kernel with many more programs than the GPU runs at a time: fewer programs, each with several blocks.

    Legal for a grid of one dimension if the kernel asks for its program once, returns at its end only, and assigns no
    parameter: then the body runs for each block as it ran in a program of its own.
    """
    one, site = one_launch(facts), facts.site
    grid = field(field(one.launch.call, "function"), "subscript") if one is not None else None
    is_product = any(name == "dot" for name, _ in site.kernel.calls)
    limit = facts.device.sm_count * (1 if is_product else PROGRAMS_PER_SM)
    if one is None or grid is None or grid.type != "tuple" or len(grid.named_children) != 1 or facts.is_tuned:
        return
    if facts.launches[0].programs < SPREAD * limit or not _can_loop(facts):
        return
    ids = [call for name, call in site.kernel.calls if name == "program_id"]
    if len(ids) != 1 or text_of(argument(ids[0], 0, "axis")) != "0":
        return
    parameter, body = with_parameter(facts, "programs"), _looped(facts, ids[0])
    if parameter is None or " = False" in parameter.new or body is None:
        return
    count = text_of(grid.named_children[0])
    yield Proposal(
        "persist",
        facts.name,
        f"Run at most {limit} programs, each for several blocks",
        (
            parameter,
            *body,
            replaced(grid.named_children[0], f"min({count}, {limit})"),
            appended(one.launch.call, f"programs={count}"),
        ),
        line_of(site.kernel.node),
        f"{facts.launches[0].programs} programs start, of which {facts.device.sm_count} multiprocessors run a few at a time",
        GAIN * facts.bound_us,
        needs_timing=True,
    )


def _can_loop(facts: Facts) -> bool:
    kernel = facts.site.kernel
    taken = {*kernel.parameters, *kernel.values, *kernel.loop_names}
    returns = any(node.type == "return_statement" for node in walk(kernel.body))
    names = {name for name, _ in kernel.calls}
    is_plain = '"""' not in text_of(kernel.body) and "'''" not in text_of(kernel.body)
    return (
        not returns
        and not {"programs", "program"} & taken
        and "num_programs" not in names
        and is_plain
        and not (assigned_in(kernel.body) & kernel.parameters.keys())
    )


def _looped(facts: Facts, call: Node) -> list[Edit] | None:
    """The edits that put the body into a loop over the blocks of a program."""
    site, text = facts.site, facts.site.text
    statements = [item for item in site.kernel.body.named_children if item.type != "comment"]
    first = statements[0]
    language = text_of(field(call, "function")).rpartition(".")[0]
    pair = assignment_of(first)
    is_named = pair is not None and pair[1] == call and len(site.kernel.values.get(text_of(pair[0]), ())) == 1
    name = text_of(pair[0]) if is_named and pair is not None else "program"
    if not language or line_start(text, first.start_byte) == line_start(text, site.kernel.node.start_byte):
        return None
    header = f"for {name} in range({language}.program_id(0), programs, {language}.num_programs(0)):"
    start = line_start(text, first.start_byte)
    indent = text[start : first.start_byte].decode()
    edits = [replaced(first, header)] if is_named else [Edit(start, start, f"{indent}{header}\n"), replaced(call, name)]
    position = line_end(text, first.end_byte) if is_named else start
    while position < site.kernel.body.end_byte:
        end = line_end(text, position)
        if text[position:end].strip():
            edits.append(Edit(position, position, "    "))
        position = end
    return edits
