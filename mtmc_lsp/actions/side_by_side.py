"""Side by side: independent kernels share one launch (horizontal fusion; Li et al., arXiv 2007.01277).

*Legal* where no kernel depends on another one, directly or through others, which a topological order of all launches proves, and
where each is one launch of independent programs. Then every program computes the same as before, on the same operands. An input
that one kernel overwrites is read by that kernel only (:mod:`mtmc_lsp.ir.output_aliasing`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from mtmc_lsp.actions.base import (
    IllegalAction,
    Situation,
    expected,
    ir_for,
    lines_of,
    region_of,
)
from mtmc_lsp.actions.titles import MOST_NAMES, joined, result_name
from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.ir.primitives import KernelIR, has_split_operands
from mtmc_lsp.ir.regions import Region, product_in
from mtmc_lsp.schedule.configs import SPLIT_PRECISION_MODES, KernelConfig, MatmulConfig, TileConfig
from mtmc_lsp.schedule.launch_units import Unit, launches, read_nodes
from mtmc_lsp.schedule.schedule import MOST_BESIDE, Schedule
from mtmc_lsp.tuning.kernel_cost import kernel_cost

LONGEST = 5.0
"""Kernels that take longer than this many launches are skipped: saving a launch hardly shortens them."""
MOST_TIMES_WARPS = 4
"""Most times the number of warps of kernels in one launch may differ: all get the largest number."""
LEAST_SHARE = 0.03
"""Share of a call's predicted time that sharing launches must save."""


class SideBySide:
    """Runs several kernels in one launch."""

    kind = ActionKind.SIDE_BY_SIDE

    def apply(self, graph: Graph, schedule: Schedule, action: MacroAction) -> Schedule:
        """The kernels of each of ``params["launches"]``, named by their last nodes, in one launch."""
        groups = _groups(action)
        ir = ir_for(graph, schedule)
        plans = {plan.key: plan for plan in schedule.kernels}
        named = [key for group in groups for key in group]
        if len(set(named)) < len(named):
            raise IllegalAction("side-by-side: a kernel can be in one launch only")
        for key in named:
            if key not in plans:
                raise IllegalAction(f"side-by-side: no kernel ends with {key}")
            region = region_of(ir, plans[key])
            if reason := _reason_against(ir, region, plans[key].config):
                raise IllegalAction(f"side-by-side: {reason}")
        others = tuple(group for group in schedule.side_by_side if not set(group) & set(named))
        for group in groups:
            if {key in ir.graph.backward_nodes for key in group} == {True, False}:
                raise IllegalAction("side-by-side: the backward pass runs later than the forward pass")
        changed = replace(schedule, side_by_side=(*others, *groups))
        try:
            launches(ir, changed)
        except CannotCode:
            raise IllegalAction("side-by-side: one of the kernels reads a result of another") from None
        return changed

    def propose(self, situation: Situation) -> Iterable[MacroAction]:
        """One action for all launches that short kernels can share."""
        schedule, ir = situation.schedule, situation.ir
        if not situation.has_gpu or len(schedule.kernels) < 2 or schedule.cuda_graph:
            return
        groups = _shared(situation)
        plans = {plan.key: plan for plan in schedule.kernels}
        nodes = tuple(name for group in groups for key in group for name in plans[key].nodes)
        if not groups or any(s.action.kind is self.kind and s.action.region == nodes for s in situation.history):
            return
        names = [result_name(ir, plans[key].nodes) for group in groups for key in group]
        is_short = all(names) and len({*names}) == len(names) <= MOST_NAMES
        kernels = f"the kernels for {joined(names)}" if is_short else f"{len(names)} independent kernels"
        word = "one launch" if len(groups) == 1 else f"{len(groups)} launches"
        action = MacroAction(
            kind=self.kind,
            region=nodes,
            lines=lines_of(ir, nodes),
            params={"launches": [list(group) for group in groups]},
            rationale="The kernels are short and independent. Sharing a launch saves launch overhead, and programs "
            "of one kernel fill multiprocessors that the last programs of another leave idle.",
            text=f"Run {kernels} in {word}",
        )
        after = self.apply(situation.graph, schedule, action)
        action = replace(action, expected=expected(situation.present, situation.cost(after)))
        if action.expected.saved_us >= LEAST_SHARE * situation.present.us:
            yield action


def _groups(action: MacroAction) -> tuple[tuple[str, ...], ...]:
    groups_data = action.params.get("launches")
    groups = tuple(tuple(map(str, group)) for group in groups_data) if isinstance(groups_data, (list, tuple)) else ()
    if not groups or any(not 1 < len(group) <= MOST_BESIDE for group in groups):
        raise IllegalAction(f"side-by-side: a launch is shared by 2 to {MOST_BESIDE} kernels")
    return groups


def _reason_against(ir: KernelIR, region: Region, config: KernelConfig) -> str:
    """Why a kernel cannot share a launch; empty if it can."""
    if not isinstance(config, (TileConfig, MatmulConfig)):
        return f"{region.kind.value} kernels cannot share a launch"
    if config.persist:
        return "a persistent kernel fills the device alone"
    if config.is_split:
        return "a split kernel is several launches"
    if isinstance(config, MatmulConfig) and config.precision in SPLIT_PRECISION_MODES:
        return "" if has_split_operands(product_in(ir, region)) else "a product of split operands is several launches"
    return ""


def _shared(situation: Situation) -> list[tuple[str, ...]]:
    """Groups of short kernels that can share a launch, in execution order."""
    ir, schedule, device = situation.ir, situation.schedule, situation.device
    try:
        all_launches = launches(ir, schedule)
    except CannotCode:
        return []
    order = _Order(ir, all_launches)
    groups: list[list[int]] = []
    warps: dict[int, int] = {}
    is_later = [launch[0].nodes[0] in ir.graph.backward_nodes for launch in all_launches]
    for i, launch in enumerate(all_launches):
        [unit, *others] = launch
        if others or unit.plan is None or unit.region is None:
            continue
        us = kernel_cost(ir, unit.region, unit.plan.config, device).us
        if _reason_against(ir, unit.region, unit.plan.config) or us > (LONGEST + 1) * device.launch_us:
            continue
        warps[i] = unit.plan.config.warps
        for members in groups:
            counts = [warps[each] for each in (*members, i)]
            is_similar = max(counts) <= MOST_TIMES_WARPS * min(counts) and is_later[members[0]] == is_later[i]
            if is_similar and len(members) < MOST_BESIDE and order.may_join(members[0], i):
                members.append(i)
                order.join(members)
                break
        else:
            groups.append([i])
    keys = [[unit.plan.key for i in members for unit in all_launches[i] if unit.plan] for members in groups]
    return [tuple(group) for group in keys if len(group) > 1]


class _Order:
    """The transitive dependencies of launches; merged launches count as one."""

    def __init__(self, ir: KernelIR, all_launches: Sequence[Sequence[Unit]]) -> None:
        launch_of = {name: i for i, launch in enumerate(all_launches) for unit in launch for name in unit.nodes}
        named = ir.graph.named
        self._before = [0] * len(all_launches)
        """For each launch, a bit set of the launches that it depends on."""
        drawn = 0
        for i, launch in enumerate(all_launches):
            # Launches are in topological order.
            names = {name for unit in launch for name in unit.computed}
            read = {name for unit in launch for name in read_nodes(ir, unit)}
            sources = {launch_of[name] for name in read if name in launch_of} - {i}
            if any(named[name].draws for name in names):
                sources |= {drawn - 1} if drawn else set()
                drawn = i + 1
            for source in sources:
                self._before[i] |= self._before[source] | 1 << source

    def may_join(self, first: int, second: int) -> bool:
        """Whether neither depends on the other."""
        return not (self._before[first] >> second & 1 or self._before[second] >> first & 1)

    def join(self, members: Sequence[int]) -> None:
        """Merge launches: their dependencies are united, and whatever depends on one depends on all."""
        bits = members_mask = 0
        for member in members:
            bits |= self._before[member]
            members_mask |= 1 << member
        for member in members:
            self._before[member] = bits
        for i, before in enumerate(self._before):
            if before & members_mask:
                self._before[i] = before | bits | members_mask
