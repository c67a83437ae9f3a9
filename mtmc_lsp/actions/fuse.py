"""Fuse, and tensor cores: which nodes become one kernel, and in which precision mode their product runs.

*Legal* when the nodes are one region (:func:`mtmc_lsp.ir.regions.analyse`): all have a primitive form; no value leaves the
region and comes back, so the order of execution stays one the graph allows; and all results share their independent axes,
so one loop nest makes each of them once. Every value is then computed from the same operands as before.
A precision mode changes how a float32 product is rounded; it is announced, verified against float64, and never proposed
under ``precision = "strict"``. With operands x = (high + low) / s, where s is a power of two, all modes that split drop low * low
alone, at most 2 ** -22 of a term. They differ in the order of fp32 additions, which is free over the reals: the terms of one
piece of K are summed first and these sums then one after the other, so that tensor cores, which round towards zero, make chains
as long as a piece, and fp32 units, which round to nearest, the chain over all pieces. A mode that was found too inexact
for a product is not proposed for it again (:mod:`mtmc_lsp.schedule.precision_modes`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace

from mtmc_lsp.actions.base import (
    IllegalAction,
    Situation,
    expected,
    ir_for,
    least_gain_us,
    new_plan,
    operation_names,
    region_of,
    size_text,
    where,
)
from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.core.json_codec import to_json
from mtmc_lsp.fusion.repeated_blocks import MANY, alike, form
from mtmc_lsp.fusion.search import Fusion, has_fp32_product
from mtmc_lsp.ir.primitives import KernelIR
from mtmc_lsp.ir.recurrence import recurrence_in, recurrence_of, steps_and_batch
from mtmc_lsp.ir.regions import Region, RegionKind, is_product
from mtmc_lsp.schedule.configs import SPLIT_PRECISION_MODES, MatmulConfig, PrecisionMode, TileConfig, precision_of
from mtmc_lsp.schedule.recurrent_configs import MODES as RECURRENT_MODES
from mtmc_lsp.schedule.schedule import Schedule
from mtmc_lsp.tuning.cost import ZERO

ON_TENSOR_CORES = RECURRENT_MODES[:-1]
"""Modes of recurrent layers that split fp32 operands for tensor cores."""
SITES = "sites"
"""The parameter with the places of an action that is done at several: nodes and configuration of each kernel."""
SMALL = 0.05
"""A part of the target's time below which a fusion is not worth a step of its own."""


class Fuse:
    """Several operations (or one) as one kernel."""

    kind = ActionKind.FUSE

    def apply(self, graph: Graph, schedule: Schedule, action: MacroAction) -> Schedule:
        """One kernel out of each of the action's sites; kernels that one touches are taken into it whole."""
        for site in sites_of(action):
            schedule = self._at(graph, schedule, site)
        return schedule

    def _at(self, graph: Graph, schedule: Schedule, action: MacroAction) -> Schedule:
        nodes = set(action.region)
        recomputed: set[str] = set()
        for kernel in schedule.kernels:
            if nodes & set(kernel.nodes):
                nodes |= set(kernel.nodes)
                recomputed |= set(kernel.recomputed)
        ir = ir_for(graph, schedule)
        again = tuple(node.name for node in ir.graph.nodes if node.name in recomputed - nodes)
        return schedule.with_kernel(new_plan(ir, nodes, action.params.get("config"), again))

    def propose(self, situation: Situation) -> Iterable[MacroAction]:
        """The most profitable disjoint regions, each product in the fastest mode that is left for it, then in the next.

        Modes that change rounding are tensor-core actions.
        """
        ir = situation.ir
        actions: list[MacroAction] = []
        for rank in range(situation.precisions.ranks):
            search = situation.search(rank)
            taken = {name for action in actions for name in action.region}
            # A first kernel is the way to everything else; one more must bring something.
            least = least_gain_us(situation.device) if situation.schedule.kernels else 0.0
            left_over = [f for f in search.best() if not f.nodes & taken and f.saved_us > least]
            tried_together = {tuple(sites(step.action)) for step in situation.history if SITES in step.action.params}
            for group in _together(left_over, situation, ir):
                # What came to nothing at all sites together may still do so at some of them.
                apart = tuple(sorted(f.region.nodes for f in group)) in tried_together
                actions += [_action(ir, each) for each in ([[f] for f in group] if apart else [group])]
        return actions


def doubted(situation: Situation) -> list[MacroAction]:
    """The one kernel to ask a GPU about where the model sees no gain in any: its estimates are no measurements."""
    searches = map(situation.search, range(situation.precisions.ranks))
    found = [fusion for search in searches if (fusion := search.least_doubted()) is not None]
    fusion = max(found, key=lambda each: each.saved_us, default=None)
    if fusion is None:
        return []
    action = _single(situation.ir, fusion)
    return [
        replace(action, rationale=f"No gain is predicted for any kernel; the GPU is asked once. {action.rationale}")
    ]


class TensorCore(Fuse):
    """A region with a float32 product, run on tensor cores by operands split into halves."""

    kind = ActionKind.TENSOR_CORE

    def apply(self, graph: Graph, schedule: Schedule, action: MacroAction) -> Schedule:
        """As a fusion, for regions with a float32 product."""
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


def sites(action: MacroAction) -> list[tuple[str, ...]]:
    """The nodes of each kernel that the action makes, sorted."""
    return sorted(site.region for site in sites_of(action))


def sites_of(action: MacroAction) -> list[MacroAction]:
    """The action at each of its sites by itself; itself where it has one alone.

    Raises:
        IllegalAction: a site has no nodes.
    """
    given = action.params.get(SITES)
    if not isinstance(given, (list, tuple)):
        return [action]
    found = []
    for item in given:
        nodes = item.get("nodes") if isinstance(item, Mapping) else None
        if not isinstance(nodes, (list, tuple)):
            raise IllegalAction(f"{action.kind.value}: a site has no nodes")
        found.append(replace(action, region=tuple(nodes), params={"config": item.get("config")}))
    return found


def _together(fusions: Sequence[Fusion], situation: Situation, ir: KernelIR) -> list[list[Fusion]]:
    """Fusions that are one step each: those of one form, and in a large target the small rest of what is no product."""
    groups = alike(fusions, lambda fusion: _form(ir, fusion))
    least = SMALL * situation.present.us
    small = [group for group in groups if len(group) == 1 and _is_small(group[0], least)]
    if len(small) < MANY:
        return groups
    return [*(group for group in groups if group not in small), [fusion for group in small for fusion in group]]


def _is_small(fusion: Fusion, least_us: float) -> bool:
    return fusion.saved_us < least_us and not is_product(fusion.region)


def _form(ir: KernelIR, fusion: Fusion) -> Hashable:
    return form(ir.graph, fusion.region.nodes), fusion.region.kind, precision_of(fusion.config)


def _action(ir: KernelIR, group: Sequence[Fusion]) -> MacroAction:
    """The action for fusions of one form; each makes a kernel of its own."""
    action = _single(ir, group[0])
    if len(group) == 1:
        return action
    ordered = sorted(group, key=lambda fusion: ir.graph.positions[fusion.region.nodes[0]])
    nodes = tuple(name for fusion in ordered for name in fusion.region.nodes)
    lines, place = where(ir, nodes)
    before, after = ZERO, ZERO
    for fusion in ordered:
        before, after = before + fusion.before, after + fusion.after
    names = operation_names(ir, group[0].region.nodes)
    if len({_form(ir, fusion) for fusion in group}) > 1:
        working = [name for fusion in ordered for name in fusion.region.nodes]
        names = f"small groups of {operation_names(ir, working)}"
        why = "Each is small, and together they are worth a step: what each group of operations computes is one kernel"
        action = replace(action, rationale=f"{why}.")
    else:
        action = replace(action, rationale=f"The same at {len(group)} places. {action.rationale}")
    verb = "run on tensor cores" if action.kind is ActionKind.TENSOR_CORE else "fuse"
    return replace(
        action,
        region=nodes,
        lines=lines,
        params={SITES: [{"nodes": list(fusion.region.nodes), "config": to_json(fusion.config)} for fusion in ordered]},
        expected=expected(before, after),
        text=f"{verb} {names} at {len(group)} places in {place}",
    )


def _single(ir: KernelIR, fusion: Fusion) -> MacroAction:
    region = fusion.region
    lines, place = where(ir, region.nodes)
    split = has_fp32_product(ir, region) and precision_of(fusion.config) in (*SPLIT_PRECISION_MODES, *ON_TENSOR_CORES)
    saved = fusion.before.bytes - fusion.after.bytes
    names = operation_names(ir, region.nodes)
    text = f"{'run on tensor cores' if split else 'fuse'} {names} in {place}"
    if region.kind is RegionKind.RECURRENT:
        why = _recurrent(ir, region)
        if split:
            why += "; each fp32 operand is split into parts for tensor cores, and their products are summed in fp32"
        text = f"run steps of {names} in {place} side by side{' on tensor cores' if split else ''}"
    elif split:
        why = (
            "Each fp32 operand is scaled and split into a high and a low float16 half, and three tensor-core products of "
            f"halves are summed in fp32: several times the rate of fp32 units at {_error_text(fusion)}"
        )
    elif len(region.nodes) == 1:
        why = "One Triton kernel reads each input once"
    else:
        gain = f"so {size_text(saved)} less moves" if saved >= 0 else f"though {size_text(saved)} more moves"
        why = f"{len(region.nodes)} operations run as one kernel, {gain} through memory"
    return MacroAction(
        kind=ActionKind.TENSOR_CORE if split else ActionKind.FUSE,
        region=region.nodes,
        lines=lines,
        params={"config": to_json(fusion.config)},
        rationale=f"{why}{_in_parts(fusion)}.",
        expected=expected(fusion.before, fusion.after),
        text=text,
        changes_rounding=split,
    )


def _recurrent(ir: KernelIR, region: Region) -> str:
    """Why the steps of recurrent layers are launched side by side."""
    prim = recurrence_in(ir, region)
    form, steps = recurrence_of(prim), steps_and_batch(ir, prim)[0].value(ir.graph.sizes)
    return (
        f"The library makes {steps * form.layers * form.directions} steps one after the other. Those that do not wait for one "
        f"another are one launch here, {form.launches(steps)} in all, and a launch may be a part of a CUDA graph"
    )


def _error_text(fusion: Fusion) -> str:
    """What splitting costs of exactness."""
    if precision_of(fusion.config) is PrecisionMode.FP16X3:
        return "once or twice their error, since fp32 units add up pieces of K"
    return "about their error, since fp32 units add up short pieces of K"


def _in_parts(fusion: Fusion) -> str:
    """What the first configuration does where one program per piece of work would leave most of the device idle."""
    if isinstance(fusion.config, TileConfig) and fusion.config.split > 1:
        return f"; {fusion.config.split} programs share each of its few long rows"
    if isinstance(fusion.config, MatmulConfig) and fusion.config.split_k > 1:
        return f"; {fusion.config.split_k} programs share the long sums of its few tiles"
    return ""
