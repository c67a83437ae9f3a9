"""Fuse and tensor-core actions: which nodes become one kernel, and in which precision mode their product runs.

*Legal* when the nodes are one region (:func:`mtmc_lsp.ir.regions.analyse`): all have a primitive form; no value leaves the
region and comes back, so the graph allows the order of execution; and all results share their independent axes, so one loop
nest computes each of them once. Every value is computed from the same operands as before.

A loop over time steps is a region where no operation of its body combines elements of the state, except for reductions along the
same axes. Then each program instance runs all iterations for its elements, in order. Elementwise operations before and after the
loop are part of it where an iteration reads or writes one slice of them: it computes that slice from slices of the operands.
Where the body multiplies its state by matrices that are the same in all iterations, rows of the state are independent. A program
instance then holds whole rows, and at most 32 tiles of 128 x 128 elements are all matrices of an iteration. With larger matrices,
or where reading them takes longer than launches, each iteration is a launch. Two slices in memory hold the states: an iteration
reads one slice and writes the other. Then no product of an iteration waits for another one, and there are no other sums.

In a backward pass, sums over all rows, such as the gradients of weights and biases of a norm, join the kernel that walks these
rows, if nothing in a row depends on them (:mod:`mtmc_lsp.ir.reductions.column_sums`). A fixed number of programs adds the rows
that each of them walks, and a second launch adds their sums, always in the same order.

Up to three 16-bit products with one left operand and equal sizes are one kernel, such as the gate and up projections of an MLP,
or queries, keys and values. Each has an accumulator, and the kernel loads the common operand once. Such sums are not split.
A product whose columns are read as two halves, as ``glu`` and ``chunk(2, -1)`` do, is computed as two such products.

Conversions of quantised weights are part of their product's kernel: scales and zero points, and the numbers of packed integers,
such as ``w & 15`` and ``w >> 4``. The kernel loads each integer once and computes its numbers in registers.

A precision mode changes how a float32 product is rounded. The action states that, verification compares with float64, and
``precision = "strict"`` excludes it. Modes that split operands use x = (high + low) / s with a power of two s, and drop only
low * low, at most 2 ** -22 of a term. The modes differ in the order of additions. Tensor cores, which round towards zero, sum the
terms of one piece of K; fp32 units, which round to nearest, add the pieces. A mode that was too inexact for a product is not
proposed for it again (:mod:`mtmc_lsp.schedule.precision_modes`).

A product that the user's code runs in TF32 may have its operands rounded to float16, which has as many significand bits, after
each row of the left operand and each column of the right one was scaled by a power of two. Elements from 2 ** -28 times the
largest one on keep all bits. Below that, an element is off by at most 2 ** -38 times the largest one of its row or column. The
guard refuses calls of programs that do not allow TF32.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace

from mtmc_lsp.actions.base import (
    SITES,
    IllegalAction,
    Situation,
    expected,
    ir_for,
    least_gain_us,
    lines_of,
    region_of,
    sites,
    sites_of,
    size_text,
    with_sites,
)
from mtmc_lsp.actions.loops.first_forms import eager_loop, in_first_forms, one_after_another, slower_than_predicted
from mtmc_lsp.actions.networks.first_version import rules_of, with_rules
from mtmc_lsp.actions.product_precision import precision_text
from mtmc_lsp.actions.titles import computes_everything, layer_of, operation_names, with_result
from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.core.json_codec import to_json
from mtmc_lsp.fusion.repeated_blocks import MANY, form, groups_of_equal
from mtmc_lsp.fusion.search import Fusion, has_fp32_product
from mtmc_lsp.fusion.unit_order import parts_in_order
from mtmc_lsp.ir.attention_mask import limited_attention_band
from mtmc_lsp.ir.constant_tables import may_be_kept
from mtmc_lsp.ir.loops.blocks import BlockForm
from mtmc_lsp.ir.loops.cells import CellForm
from mtmc_lsp.ir.loops.fusion import loop_in
from mtmc_lsp.ir.primitives import KernelIR
from mtmc_lsp.ir.recurrence import recurrence_in, recurrence_of, steps_and_batch
from mtmc_lsp.ir.regions import Region, RegionKind, is_product
from mtmc_lsp.schedule.cell_configs import keeps_columns, keeps_matrices, kept_tiles
from mtmc_lsp.schedule.configs import (
    SPLIT_PRECISION_MODES,
    KernelConfig,
    LoopConfig,
    MatmulConfig,
    PrecisionMode,
    TileConfig,
    precision_of,
)
from mtmc_lsp.schedule.recurrent_configs import MODES as RECURRENT_MODES
from mtmc_lsp.schedule.schedule import KernelPlan, Schedule
from mtmc_lsp.tuning.cost import ZERO
from mtmc_lsp.tuning.loop_forms import form_of

ON_TENSOR_CORES = RECURRENT_MODES[:-1]
"""Modes of recurrent layers that split fp32 operands for tensor cores."""
SMALL = 0.05
"""Share of the target's time below which a fusion is not worth a separate step."""


class Fuse:
    """Runs one or several operations as one kernel."""

    kind = ActionKind.FUSE

    def apply(self, graph: Graph, schedule: Schedule, action: MacroAction) -> Schedule:
        """One kernel per site of the action; existing kernels that overlap a site become part of it.

        That of a network may name rewrites of the whole graph, which come first.
        """
        return with_sites(graph, with_rules(schedule, rules_of(action)), action)

    def propose(self, situation: Situation) -> Iterable[MacroAction]:
        """The most profitable disjoint regions, each product in the fastest mode that is left for it, then in the next.

        Modes that change rounding are tensor-core actions.
        """
        ir = situation.ir
        actions = list(slower_than_predicted(situation))
        for rank in range(situation.precisions.ranks):
            search = situation.search(rank)
            used = {name for action in actions for name in action.region}
            # A first kernel is the way to everything else; one more must bring something.
            least = least_gain_us(situation.device) if situation.schedule.kernels else 0.0
            remaining = [f for f in search.best() if not f.nodes & used and f.saved_us > least]
            tried_together = {
                tuple(sites(step.action))
                for step in situation.history
                if SITES in step.action.params
                and not any(form_of(s.params.get("config")) for s in sites_of(step.action))
            }
            for group in _together(remaining, situation, ir):
                slower = [one_after_another(situation, fusion) for fusion in group]
                if slower != list(group):
                    action = _action(ir, group, situation.target, are_first=not situation.schedule.kernels)
                    actions.append(in_first_forms(situation, action, group, slower))
                    # These follow if that step is not accepted.
                    group = slower
                # What failed at all sites together may still succeed at some of them.
                must_try_separately = tuple(sorted(f.region.nodes for f in group)) in tried_together
                actions += [
                    _action(ir, each, situation.target, are_first=not situation.schedule.kernels)
                    for each in ([[f] for f in group] if must_try_separately else [group])
                    if all(fusion.saved_us > 0 for fusion in each)
                ]
        return actions


def uncertain(situation: Situation) -> list[MacroAction]:
    """The most promising kernel, to be measured once where the model predicts no gain for any: estimates may be wrong."""
    searches = map(situation.search, range(situation.precisions.ranks))
    candidates = [fusion for search in searches if (fusion := search.least_uncertain()) is not None]
    fusion = max(candidates, key=lambda each: each.saved_us, default=None)
    if fusion is None:
        return []
    action = _single(situation.ir, fusion, situation.target)
    return [
        replace(
            action, rationale=f"No gain is predicted for any kernel, so one is measured to check. {action.rationale}"
        )
    ]


class TensorCore(Fuse):
    """Runs a region with a float32 product on tensor cores: its operands become scaled float16 numbers, or two halves of them."""

    kind = ActionKind.TENSOR_CORE

    def apply(self, graph: Graph, schedule: Schedule, action: MacroAction) -> Schedule:
        """Like a fusion; only for regions with a float32 product."""
        changed = super().apply(graph, schedule, action)
        ir = ir_for(graph, changed)
        for site in sites_of(action):
            plan = next(kernel for kernel in changed.kernels if set(site.region) & set(kernel.nodes))
            if not has_fp32_product(ir, region_of(ir, plan)):
                raise IllegalAction("tensor-core: the region has no float32 matrix product")
        return changed

    def propose(self, situation: Situation) -> Iterable[MacroAction]:
        """:class:`Fuse` proposes both: they compete for the same nodes."""
        return ()


TENSOR_CORES = (
    "Tensor cores multiply float16 numbers several times as fast as the GPU multiplies float32. So each float32 number is "
    "split into two float16 numbers, and three products of these replace each product."
)
"""Why a float32 product runs on tensor cores."""
THREE_PRODUCTS = "Tensor cores compute each float32 product as three TF32 products, which is as exact"
"""Why products that run on tensor cores are still float32, where each iteration is a launch."""


SCALED = (
    "Your code runs the product in TF32, which has as many significand bits as float16. Float16 operands take half the "
    "memory, and tensor cores multiply them twice as fast. A power of two for each row and column keeps their range"
)
"""Why a product that may run in TF32 gets scaled float16 operands."""


def _together(fusions: Sequence[Fusion], situation: Situation, ir: KernelIR) -> list[list[Fusion]]:
    """Groups of fusions that are one step each: those of one form, and the ones without a product that pay as one step only.

    These are the small ones of a large target, and the first ones in training: the captured passes have more operations than
    eager mode, whose losses and norms have their own backward operations, so that few kernels alone make a call slower.
    """
    groups = groups_of_equal(fusions, lambda fusion: _form(ir, fusion))
    least, fewest = SMALL * situation.present.us, MANY
    if ir.graph.backward is not None and not situation.schedule.kernels:
        joined, fewest = _compatible(groups, situation.schedule, ir), 2
    else:
        joined = [group for group in groups if len(group) == 1 and _is_small(group[0], least)]
    if len(joined) < fewest:
        return groups
    return [*(group for group in groups if group not in joined), [fusion for group in joined for fusion in group]]


def _compatible(groups: Sequence[list[Fusion]], schedule: Schedule, ir: KernelIR) -> list[list[Fusion]]:
    """The groups without a product whose kernels can all run, in some order; those that save most come first.

    What a launcher keeps from call to call needs no kernel.
    """
    named = ir.graph.named
    sources = {name: [ref.name for ref in node.inputs() if ref.name in named] for name, node in named.items()}
    kept, chosen = may_be_kept(ir.graph), list[list[Fusion]]()
    for group in sorted(groups, key=lambda each: -sum(fusion.saved_us for fusion in each)):
        if is_product(group[0].region) or any(kept.issuperset(fusion.region.nodes) for fusion in group):
            continue
        larger, can_run = schedule, True
        for fusion in group:
            can_run = can_run and len(parts_in_order(sources, larger, fusion.nodes)) == 1
            larger = larger.with_kernel(KernelPlan(fusion.region.nodes, fusion.config))
        if can_run:
            schedule = larger
            chosen.append(group)
    return chosen


def _is_small(fusion: Fusion, least_us: float) -> bool:
    return fusion.saved_us < least_us and not is_product(fusion.region)


def _form(ir: KernelIR, fusion: Fusion) -> Hashable:
    return form(ir.graph, fusion.region.nodes), fusion.region.kind, precision_of(fusion.config)


def _action(ir: KernelIR, group: Sequence[Fusion], target: str, *, are_first: bool) -> MacroAction:
    """The action for fusions of one form; each becomes a separate kernel.

    Args:
        are_first: whether the schedule has no kernels yet.
    """
    action = _single(ir, group[0], target)
    if len(group) == 1:
        return action
    ordered = sorted(group, key=lambda fusion: ir.graph.positions[fusion.region.nodes[0]])
    nodes = tuple(name for fusion in ordered for name in fusion.region.nodes)
    lines = lines_of(ir, nodes)
    before, after = ZERO, ZERO
    for fusion in ordered:
        before, after = before + fusion.before, after + fusion.after
    title = action.text
    if len({_form(ir, fusion) for fusion in group}) > 1:
        working = [name for fusion in ordered for name in fusion.region.nodes]
        size, why = "small groups", "Each gain is small, so all of them are one step"
        if ir.graph.backward is not None and are_first:
            size, why = (
                "groups",
                "A call with its backward pass may be faster with all of them only, so they are one step",
            )
        title = f"Fuse {size} of {operation_names(ir, working)}"
        action = replace(action, rationale=f"Each group of operations becomes one kernel. {why}.")
    else:
        action = replace(action, rationale=f"The same code occurs at {len(group)} places. {action.rationale}")
    return replace(
        action,
        region=nodes,
        lines=lines,
        params={SITES: [{"nodes": list(fusion.region.nodes), "config": to_json(fusion.config)} for fusion in ordered]},
        expected=expected(before, after),
        text=f"{title} at {len(group)} places",
    )


def _single(ir: KernelIR, fusion: Fusion, target: str) -> MacroAction:
    region = fusion.region
    mode = precision_of(fusion.config)
    is_scaled = mode is PrecisionMode.FP16_SCALED
    split = has_fp32_product(ir, region) and (is_scaled or mode in (*SPLIT_PRECISION_MODES, *ON_TENSOR_CORES))
    in_three = region.kind is RegionKind.LOOP and mode in ON_TENSOR_CORES
    saved = fusion.before.bytes - fusion.after.bytes
    kind = ActionKind.TENSOR_CORE if split else ActionKind.FUSE
    text = _title(ir, region.nodes, target, on_tensor_cores=split)
    if region.kind is RegionKind.RECURRENT:
        why = _recurrent(ir, region)
        if split:
            why += f". {TENSOR_CORES}"
        text = f"Run independent steps of {operation_names(ir, region.nodes)} in one launch"
    elif region.kind is RegionKind.LOOP:
        why = _loop(ir, region, fusion.config)
        if len(region.nodes) > 1 and saved > 0:
            why += f". Operations around the loop run inside it, which saves {size_text(saved)} of memory traffic"
        is_stepwise = isinstance(fusion.config, LoopConfig) and fusion.config.is_stepwise
        what = (
            "Run each iteration of the loop as one launch"
            if is_stepwise
            else "Run all iterations of the loop in one kernel"
        )
        text = with_result(ir, what, region.nodes)
        if in_three:
            why += f". {THREE_PRODUCTS}"
    elif is_scaled:
        why = SCALED
        text += " on scaled float16 operands"
    elif split:
        why = f"{TENSOR_CORES} {_error_text(fusion)}"
    elif region.kind is RegionKind.ATTENTION and limited_attention_band(ir, region) is not None:
        why = f"{len(region.nodes)} operations" if len(region.nodes) > 1 else "The operation"
        why += (
            f" run{'' if len(region.nodes) > 1 else 's'} as one kernel, which does not read keys and values that the mask hides "
            "from a block of queries. NaN and infinity among these values do not reach the result"
        )
    elif len(region.nodes) == 1:
        why = "One Triton kernel that reads each input once"
    else:
        gain = f"which saves {size_text(saved)}" if saved >= 0 else f"which adds {size_text(saved)}"
        why = f"{len(region.nodes)} operations run as one kernel, {gain} of memory traffic"
    return MacroAction(
        kind=kind,
        region=region.nodes,
        lines=lines_of(ir, region.nodes),
        params={"config": to_json(fusion.config)},
        rationale=f"{why}{_in_parts(fusion)}.{precision_text(ir, region, fusion.config)}",
        expected=expected(fusion.before, fusion.after),
        text=f"{text} on tensor cores" if split and not is_scaled else text,
        changes_rounding=split or in_three,
    )


def _title(ir: KernelIR, nodes: Sequence[str], target: str, *, on_tensor_cores: bool) -> str:
    """What the action does, in the names of the user's variables and modules."""
    names = operation_names(ir, nodes)
    if len(nodes) == 1 and on_tensor_cores:
        return f"Run {names if layer_of(ir.graph, ir.graph.node(nodes[0])) else with_result(ir, names, nodes)}"
    if len(nodes) == 1:
        return f"{with_result(ir, f'Write {names}', nodes)} as a Triton kernel"
    if computes_everything(ir.graph, nodes):
        return f"Fuse all of {target} into one kernel"
    return with_result(ir, f"Fuse {names} into one kernel", nodes)


def _recurrent(ir: KernelIR, region: Region) -> str:
    """Why independent steps of recurrent layers share a launch."""
    prim = recurrence_in(ir, region)
    form, steps = recurrence_of(prim), steps_and_batch(ir, prim)[0].value(ir.graph.sizes)
    return (
        f"The library runs {steps * form.layers * form.directions} steps one after another. Here, independent steps "
        f"share a launch ({form.launches(steps)} in all), and the launches can be part of a CUDA graph"
    )


def _loop(ir: KernelIR, region: Region, config: KernelConfig) -> str:
    """Why a loop over time steps becomes one kernel."""
    if isinstance(config, LoopConfig) and config.is_stepwise:
        return (
            f"{eager_loop(ir, region)}. Here, an iteration is one launch, in which all multiprocessors share the matrices. They "
            "are read from a cache in each iteration, and the launches can be part of a CUDA graph"
        )
    text = (
        f"{eager_loop(ir, region)}. Here, a program instance holds its part of the state in registers and runs all "
        "iterations; no iteration combines elements of different program instances"
    )
    cell = loop_in(ir, region)
    if isinstance(cell, CellForm):
        kept = "the matrices stay in registers"
        in_columns = isinstance(config, LoopConfig) and keeps_columns(cell, config)
        if not (keeps_matrices(cell) or in_columns):
            kept = "the matrices are read from a cache in each iteration"
            if isinstance(config, LoopConfig) and kept_tiles(cell, config):
                kept += ", except for a part that stays in registers"
        text += f". Its part is whole rows, and {kept}"
    elif isinstance(cell, BlockForm):
        text += f". Its part is a block: no value has more than {cell.largest} elements in an iteration"
    return text


def _error_text(fusion: Fusion) -> str:
    """How the error of split operands compares with fp32 units."""
    if precision_of(fusion.config) is PrecisionMode.FP16X3:
        return "The rounding error is one to two times that of float32 arithmetic"
    return "The rounding error is about that of float32 arithmetic"


def _in_parts(fusion: Fusion) -> str:
    """How the first configuration splits work where it would otherwise leave most of the device idle."""
    if isinstance(fusion.config, TileConfig) and fusion.config.split > 1:
        return f". {fusion.config.split} programs share each of its few long rows"
    if isinstance(fusion.config, MatmulConfig) and fusion.config.split_k > 1:
        return f". {fusion.config.split_k} programs share the long sums of its few tiles"
    return ""
