"""*Split-k*: several programs add up parts of a product's inner dimension."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tree_sitter import Node

from mtmc_lsp.kernels.actions.base import MICROSECONDS, Facts, Proposal, after, assigned_in, before, loops_of, uses
from mtmc_lsp.kernels.actions.fusion.launcher import OneLaunch, is_fresh, occurrences, one_launch, only_accesses
from mtmc_lsp.kernels.actions.numbers import trips
from mtmc_lsp.kernels.actions.offsets import LoopSteps, loop_steps
from mtmc_lsp.kernels.repairs.site import Edit, Site, appended, replaced
from mtmc_lsp.source.lint.kernel import argument
from mtmc_lsp.source.syntax import field, line_of, text_of, walk

MOST_SPLITS = 16
LEAST_TRIPS = 4
"""Iterations that each program keeps."""
TYPES: Mapping[str, str] = {"*fp32": "float32", "*fp16": "float16", "*bf16": "bfloat16"}


def split_k(facts: Facts) -> Iterator[Proposal]:
    """A product with few tiles: several programs add up parts of its inner dimension.

    Legal if the kernel does nothing with its sum but convert and store it once, the tensor is new, and one loop over the blocks
    of the inner dimension carries the sum and pointers that grow by the same amount in each iteration. The parts are added in
    float32 and in any order, which changes rounding.
    """
    one, loops, site = one_launch(facts), loops_of(facts.site), facts.site
    steps = loop_steps(loops[0], site) if len(loops) == 1 else None
    names = {name for name, _ in site.kernel.calls}
    if one is None or steps is None or "dot" not in names or any(name.startswith("atomic") for name in names):
        return
    if any("restore_value" in text_of(item) or "reset_to_zero" in text_of(item) for item in site.kernel.decorators):
        return
    loop, programs, count = loops[0], facts.launches[0].programs, trips(loops[0], facts)
    splits = _splits(facts.device.sm_count, programs, count)
    grid = _grid(one)
    if splits < 2 or grid is None or "num_programs" in names:
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
            *store[1],
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


def _only_store(facts: Facts, one: OneLaunch, total: str) -> tuple[Node, list[Edit]] | None:
    """The store of the sum, and the edits that create its tensor with zeros of float32, and store the sum as it is."""
    site = facts.site
    stores = [call for name, call in site.accesses if name == "store"]
    pointer = argument(stores[0], 0, "pointer") if len(stores) == 1 else None
    parameters = site.bases(pointer) if pointer is not None else []
    if len(parameters) != 1 or not only_accesses(facts, parameters[0], "store"):
        return None
    tensor = one.passed.get(parameters[0])
    kinds = {work.launch.signature.get(parameters[0], "") for work in facts.launches}
    options = {text_of(field(i, "name")) for i in walk(stores[0]) if i.type == "keyword_argument"}
    after = [n for n in walk(site.kernel.body) if text_of(n) == total and n.start_byte > loops_of(site)[0].end_byte]
    uses_after = [n for n in after if n.type == "identifier"]
    value = _uncast(site, argument(stores[0], 1, "value"), total)
    kind = kinds.pop() if len(kinds) == 1 else ""
    if value is None or len(uses_after) != 1 or kind not in TYPES or options - {"mask"} or tensor is None:
        return None
    created = is_fresh(one, text_of(tensor)) if tensor.type == "identifier" else None
    if created is None or one.is_shared(parameters[0]):
        return None
    edits = _as_zeros(one, text_of(tensor), created, TYPES[kind])
    if edits is None:
        return None
    if text_of(value) != total:
        edits.append(replaced(value, total))
    return stores[0], [*edits, *_reset(facts, parameters[0])]


def _uncast(site: Site, value: Node | None, total: str) -> Node | None:
    """The expression that converts the sum to the type of the tensor, or the sum itself; None for other values."""
    if value is not None and value.type == "identifier" and text_of(value) != total:
        values = site.kernel.values.get(text_of(value), ())
        value = values[0] if len(values) == 1 else None
    if value is None or text_of(value) == total:
        return value
    function = field(value, "function")
    if site.kernel.triton_name(function) == "cast":
        operand = argument(value, 0, "input")
    else:
        is_cast = (
            function is not None and function.type == "attribute" and text_of(field(function, "attribute")) == "to"
        )
        operand = field(function, "object") if is_cast else None
    return value if operand is not None and text_of(operand) == total else None


def _as_zeros(one: OneLaunch, tensor: str, created: Node, kind: str) -> list[Edit] | None:
    """The edits that create a tensor with zeros; one of 16 bits as float32, which is converted after the launch."""
    function, arguments = field(created, "function"), field(created, "arguments")
    if function is None or arguments is None:
        return None
    edits = [replaced(function, text_of(function).replace("empty", "zeros"))]
    if kind == "float32":
        return edits
    dtype = argument(created, len(arguments.named_children), "dtype")
    launch = one.statements[one.position]
    text = text_of(dtype) if dtype is not None else f"torch.{kind}"
    edits.append(replaced(dtype, "torch.float32") if dtype is not None else appended(created, "dtype=torch.float32"))
    return [*edits, after(one.facts.site.text, launch, f"{tensor} = {tensor}.to({text})")]


def _reset(facts: Facts, parameter: str) -> list[Edit]:
    """The edit of an autotuner, which adds up the parts of each configuration that it times."""
    calls = [node for item in facts.site.kernel.decorators for node in item.named_children if node.type == "call"]
    tuners = [call for call in calls if text_of(field(call, "function")).endswith("autotune")]
    return [appended(call, f'reset_to_zero=["{parameter}"]') for call in tuners]


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
