"""*Persist*: fewer programs, which compute several blocks each."""

from __future__ import annotations

from collections.abc import Iterator

from tree_sitter import Node

from mtmc_lsp.kernels.actions.base import Facts, Proposal, assigned_in, assignment_of
from mtmc_lsp.kernels.actions.fusion.launcher import one_launch
from mtmc_lsp.kernels.actions.signatures import with_parameter
from mtmc_lsp.kernels.actions.tuning.blocks import free_blocks
from mtmc_lsp.kernels.repairs.site import Edit, appended, replaced
from mtmc_lsp.source.lint.kernel import argument
from mtmc_lsp.source.syntax import field, line_end, line_of, line_start, text_of, walk

PROGRAMS_PER_SM, SPREAD = 8, 4
"""Programs of a persistent elementwise kernel on each multiprocessor, and how many blocks each of them computes at least."""
WARP = 32
"""Threads of a warp: a smaller block leaves some idle."""
GAIN = 0.05
"""Estimated share of the time that the start of programs takes."""


def persist(facts: Facts) -> Iterator[Proposal]:
    """A kernel with many more programs than the GPU runs at a time: fewer programs, each with several blocks.

    Legal for a grid of one dimension if the kernel calls ``program_id`` once, returns at its end only, and assigns no
    parameter: then the body runs for each block as it ran in a separate program.
    """
    one, site = one_launch(facts), facts.site
    grid = field(field(one.launch.call, "function"), "subscript") if one is not None else None
    is_product = any(name == "dot" for name, _ in site.kernel.calls)
    limit = facts.device.sm_count * (1 if is_product else PROGRAMS_PER_SM)
    if one is None or grid is None or grid.type != "tuple" or len(grid.named_children) != 1 or facts.is_tuned:
        return
    if facts.launches[0].programs < SPREAD * limit or not _can_loop(facts):
        return
    if not is_product and any(block.grids and block.size < WARP for block in free_blocks(facts)):
        # Larger blocks have the same effect, and the autotuner tries them only on a grid that counts blocks.
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
    if is_named:
        edits, position = [replaced(first, header)], line_end(text, first.end_byte)
    else:
        edits, position = [Edit(start, start, f"{indent}{header}\n    "), replaced(call, name)], line_end(text, start)
    while position < site.kernel.body.end_byte:
        end = line_end(text, position)
        if text[position:end].strip():
            edits.append(Edit(position, position, "    "))
        position = end
    return edits
