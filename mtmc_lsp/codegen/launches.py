"""Writes the kernels of a schedule and the statements of the launcher that runs them."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from mtmc_lsp.codegen.attention.gradient_kernel import write_gradient_kernel
from mtmc_lsp.codegen.attention.kernels import write_attention_kernels
from mtmc_lsp.codegen.kernel.kernel import Kernel
from mtmc_lsp.codegen.kernel.snippets import LINE
from mtmc_lsp.codegen.loop.chunks.chunk_kernel import write_chunk_kernels
from mtmc_lsp.codegen.loop.iterations import sources_of
from mtmc_lsp.codegen.loop.loop_kernel import write_loop_kernel
from mtmc_lsp.codegen.loop.scan_kernel import write_scan_kernels
from mtmc_lsp.codegen.matmul.matmul_kernel import write_product_kernels, write_whole_product
from mtmc_lsp.codegen.matmul.split_k import write_split_product
from mtmc_lsp.codegen.matmul.split_on_load import write_product_split_on_load
from mtmc_lsp.codegen.matmul.stream_k import write_stream_product
from mtmc_lsp.codegen.module.launchers.launcher import Launcher
from mtmc_lsp.codegen.module.naming import identifier, kernel_name, launch_key, value_name
from mtmc_lsp.codegen.module.shared_kernels import KernelNames, SharedKernels
from mtmc_lsp.codegen.module.side_by_side import side_by_side
from mtmc_lsp.codegen.recurrent.recurrent_launcher import RecurrentSteps
from mtmc_lsp.codegen.row_loop import LoopBody
from mtmc_lsp.codegen.tile.column_sum_kernels import write_column_sum_kernels
from mtmc_lsp.codegen.tile.split_kernel import write_split_kernels
from mtmc_lsp.codegen.tile.tile_kernel import write_tile_kernel
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.ir.loops.fusion import loop_in
from mtmc_lsp.ir.primitives import KernelIR
from mtmc_lsp.ir.regions import VIEWS, Region, RegionKind
from mtmc_lsp.schedule.configs import (
    AttentionConfig,
    KernelConfig,
    LoopConfig,
    MatmulConfig,
    RecurrentConfig,
    TileConfig,
)
from mtmc_lsp.schedule.launch_units import Unit
from mtmc_lsp.schedule.matmul_configs import by_pointers
from mtmc_lsp.schedule.schedule import KernelPlan

DISTRIBUTION = {
    RegionKind.MAP: "One pass over memory",
    RegionKind.REDUCE: "One program instance reads, reduces and writes each row",
    RegionKind.SCAN: "One program instance scans each row, one block of columns at a time",
    RegionKind.MATMUL: "Each program instance computes one tile of the product and applies the fused operations in registers",
    RegionKind.RECURRENT: "Each launch runs the independent steps of all layers (or directions); launches run in sequence. "
    "Each program instance computes all gates of a block of units",
    RegionKind.LOOP: "Each program instance holds a tile of the states in registers and runs all iterations, one after another",
    RegionKind.ATTENTION: "Each program instance holds a block of queries and loops over the keys; scores stay on chip",
    RegionKind.ATTENTION_GRADIENT: "Each program instance computes the probabilities again, tile by tile, and sums its tiles "
    "in registers",
}
MAX_NAMED_RESULTS = 3
"""Maximum number of results that appear in the name of a kernel that computes several."""


def write_launches(
    ir: KernelIR,
    units: Sequence[Sequence[Unit]],
    launcher: Launcher,
    names: KernelNames,
    shared: SharedKernels,
    base: str,
    lines: list[str],
    device: DeviceModel,
    loop_kernels: Sequence[KernelPlan] = (),
) -> list[Kernel]:
    """Write the kernels and torch calls of a launcher, in order.

    Args:
        units: by launch, in the order of execution.
        launcher: gets the statements.
        base: begins the names of the kernels.
        lines: of the user's file.
        loop_kernels: kernels of operations that run for one chunk of rows after another.

    Returns:
        The kernels that are launched; a shared kernel may appear several times, each time with its own limits.
    """
    kernels: list[Kernel] = []
    is_one_of_several = sum(not _is_view(ir, unit) for launch in units for unit in launch) > 1
    launched: list[Unit] = []
    for unit, *grouped in units:
        launcher.done |= {name for each in launched for name in each.nodes}
        launched = [unit, *grouped]
        if unit.plan is None or unit.region is None:
            node = ir.graph.node(unit.nodes[0])
            if node.row_loop is None:
                launcher.torch_call(node)
                continue
            for ref in node.inputs():
                launcher.find(ref)
            body = LoopBody.of(node, launcher, loop_kernels, f"{base}_chunk")
            written = write_launches(body.ir, body.units, body.launcher, names, shared, base, lines, device)
            body.return_early()
            rest = body.units_for_gradients
            written += write_launches(body.ir, rest, body.launcher, names, shared, base, lines, device)
            kernels += body.finish(written)
            continue
        if grouped:
            launch = [unit, *grouped]
            kernel = shared.shared(_write_side_by_side(ir, launch, launcher, base, names, lines, device))
            launcher.launch(kernel, [each.region for each in launch if each.region is not None])
            kernels.append(kernel)
            parts = [each.nodes[-1] for each in launch]
            names.written(launch_key(launch), kernel.name, [kernel.name, *kernel.functions], parts)
            continue
        key = unit.nodes[-1]
        name = names.choose(key, kernel_name(ir, unit, base, is_one_of_several))
        if isinstance(unit.plan.config, RecurrentConfig):
            docstring = _docstring(ir, unit.region, unit.plan, lines)
            steps = RecurrentSteps(ir, unit.region, unit.plan.config)
            kernel = shared.shared(steps.kernel(name, docstring))
            steps.launch(launcher, kernel)
            kernels.append(kernel)
            names.written(key, kernel.name, [kernel.name])
            continue
        written = []
        drafts = _write_kernels(ir, unit.region, unit.plan, launcher, name, lines, device)
        main = next((draft for draft in drafts if draft.name == name), drafts[-1])
        for draft in drafts:
            if draft is not main:
                names.note_helper(draft)
            written.append(shared.shared(draft))
            launcher.launch(written[-1], [unit.region])
        kernels += written
        names.written(key, written[drafts.index(main)].name, [kernel.name for kernel in written])
    launcher.done |= {name for each in launched for name in each.nodes}
    for ref in ir.graph.outputs:
        launcher.find(ref)
    return kernels


def _is_view(ir: KernelIR, unit: Unit) -> bool:
    """Whether it is a torch call that computes nothing."""
    return unit.plan is None and ir.graph.node(unit.nodes[-1]).op.split(".")[1] in VIEWS


def _write_kernels(
    ir: KernelIR,
    region: Region,
    plan: KernelPlan,
    launcher: Launcher,
    name: str,
    lines: list[str],
    device: DeviceModel,
) -> list[Kernel]:
    sources = sources_of(ir, loop_in(ir, region).node) if isinstance(plan.config, LoopConfig) else ()
    missing = [prim for prim in (*region.inputs, *sources) if prim not in launcher.buffers]
    if missing:
        raise CannotCode(f"the input {ir.prims[missing[0]].origin} of this kernel is not in memory; fuse its producer")
    config = plan.config
    docstring = _docstring(ir, region, plan, lines)
    if isinstance(config, MatmulConfig):
        if config.splits_one_operand_on_load:
            return write_product_split_on_load(ir, region, launcher.buffers, config, name, docstring, device)
        write_product = write_whole_product
        if config.split_k > 1:
            write_product = write_split_product
        elif config.stream_k:
            write_product = write_stream_product
        kernels = write_product_kernels(ir, region, launcher.buffers, config, name, docstring, write_product, device)
        if all(launcher.supports_descriptors(kernel) for kernel in kernels):
            return kernels
        config = by_pointers(config, device)
        return write_product_kernels(ir, region, launcher.buffers, config, name, docstring, write_product, device)
    if isinstance(config, AttentionConfig):
        if region.kind is RegionKind.ATTENTION_GRADIENT:
            return [write_gradient_kernel(ir, region, launcher.buffers, config, name, docstring)]
        return write_attention_kernels(ir, region, launcher.buffers, config, name, docstring)
    if isinstance(config, LoopConfig):
        if config.is_scan:
            return write_scan_kernels(ir, region, launcher.buffers, config, name, docstring)
        if config.is_chunked:
            return write_chunk_kernels(ir, region, launcher.buffers, config, name, docstring)
        return [write_loop_kernel(ir, region, launcher.buffers, config, name, docstring)]
    assert isinstance(config, TileConfig)
    if region.sums:
        return write_column_sum_kernels(ir, region, launcher.buffers, config, name, docstring)
    if config.is_split:
        return write_split_kernels(ir, region, launcher.buffers, config, name, docstring)
    return [write_tile_kernel(ir, region, launcher.buffers, config, name, docstring)]


def _write_side_by_side(
    ir: KernelIR,
    units: Sequence[Unit],
    launcher: Launcher,
    base: str,
    names: KernelNames,
    lines: list[str],
    device: DeviceModel,
) -> Kernel:
    """Write the kernels of several units as one launch."""
    members: list[Kernel] = []
    for unit in units:
        assert unit.plan is not None and unit.region is not None
        name = names.choose(unit.nodes[-1], kernel_name(ir, unit, base, is_one_of_several=True))
        written = _write_kernels(ir, unit.region, unit.plan, launcher, name, lines, device)
        if len(written) > 1:
            raise CannotCode(f"{name} needs {len(written)} launches; only kernels with one launch can share a launch")
        members += written
    results = [value_name(ir, unit.region.outputs[-1]) for unit in units if unit.region is not None]
    named_results = results if len(results) <= MAX_NAMED_RESULTS else [*results[: MAX_NAMED_RESULTS - 1], "others"]
    name = names.choose(launch_key(units), f"{base}_{identifier('_and_'.join(named_results))}_kernel")
    return side_by_side(name, members, f"{', '.join(results[:-1])} and {results[-1]}, in one launch.")


def _distribution(region: Region, config: KernelConfig) -> str:
    """Describe how the work is distributed over program instances."""
    if isinstance(config, AttentionConfig) and config.is_split:
        return "Several program instances share the keys of a query; each instance combines the parts of a block of queries"
    if isinstance(config, TileConfig) and config.is_split:
        return "Several program instances share each row and combine the partial results of the preceding kernels"
    if isinstance(config, LoopConfig) and config.is_scan:
        shared = "" if config.segments == 1 else f", {config.segments} program instances for each tile"
        return f"Each program instance scans chunks of {config.steps} iterations{shared}"
    if isinstance(config, LoopConfig) and config.is_chunked:
        return f"Each program instance computes chunks of {config.chunk} iterations by products of matrices"
    if isinstance(config, LoopConfig) and config.is_stepwise:
        return "Each launch runs one iteration. A program instance computes some columns of some rows, and states are in memory"
    if isinstance(config, MatmulConfig) and config.split_k > 1:
        return "Adds the partial sums over K and applies the fused operations to the tile in registers"
    if isinstance(config, MatmulConfig) and config.stream_k:
        return "Adds the partial sums of shared tiles and applies the fused operations to each tile in registers"
    if region.sums:
        return "Each program instance walks rows and adds up what the sums over all rows need of them"
    how = DISTRIBUTION[region.kind]
    is_persistent = isinstance(config, (TileConfig, MatmulConfig)) and config.persist > 0
    return f"{how}; each program instance loops over several work items" if is_persistent else how


def _docstring(
    ir: KernelIR,
    region: Region,
    plan: KernelPlan,
    lines: list[str],
) -> str:
    """The kernel's docstring: the source lines that it computes, and which memory traffic it avoids."""
    nodes = [ir.graph.node(name) for name in (*region.nodes, *plan.recomputed)]
    within = [inner for node in nodes if node.loop is not None for inner in node.loop.nodes]
    line_numbers = sorted({node.line for node in (*nodes, *within)} - {0})
    quoted = [lines[n - 1].rstrip() for n in line_numbers if 0 < n <= len(lines)]
    # The body of a loop stays indented.
    margin = min((len(text) - len(text.lstrip()) for text in quoted), default=0)
    quoted = [text[margin:] if within else text.strip() for text in quoted]
    quoted = [text if len(text) <= LINE else f"{text[: LINE - 4]} ..." for text in quoted]
    results = ", ".join(value_name(ir, ref) for ref in region.outputs)
    n_intermediates = len(region.nodes) - len(region.outputs)
    memory_note = "; intermediate values are not written to memory" if n_intermediates > 0 else ""
    distribution = _distribution(region, plan.config)
    summary = f"{results}, in one kernel."
    source_lines = "".join(f"    {text}\n" for text in dict.fromkeys(quoted))
    prose = textwrap.fill(f"{distribution}{memory_note}.", LINE)
    return f"{summary}\n\n{source_lines}\n{prose}".replace('"""', "'''").replace("\\", "\\\\")
