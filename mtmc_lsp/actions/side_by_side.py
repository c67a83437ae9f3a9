"""Side by side: kernels that do not wait for one another become one launch (horizontal fusion; Li et al., arXiv 2007.01277).

*Legal* where none of the kernels reads, over any path, what another of them writes, which an order of all launches in which each
value is made before it is read shows; and where each is one launch whose programs are independent. Then every program does what
it did, on the same operands: none of them sees which others run at the same time. An input that one of them overwrites is read by
that one alone (:mod:`mtmc_lsp.ir.output_aliasing`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from mtmc_lsp.actions.base import (
    IllegalAction,
    Situation,
    expected,
    ir_for,
    region_of,
    where,
)
from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.ir.primitives import KernelIR, has_split_operands
from mtmc_lsp.ir.regions import Region, product_in
from mtmc_lsp.schedule.configs import SPLIT_PRECISION_MODES, KernelConfig, MatmulConfig, TileConfig
from mtmc_lsp.schedule.launch_units import Unit, launches
from mtmc_lsp.schedule.schedule import MOST_BESIDE, Schedule
from mtmc_lsp.tuning.cost import kernel_cost

LONGEST = 5.0
"""Kernels that take longer than so many launches are left alone: what a launch less saves is nothing beside them."""
MOST_TIMES_WARPS = 4
"""How many times as many warps as its own a kernel may be given: those of the one that has most."""
LEAST_SHARE = 0.03
"""Part of a call's predicted time that sharing launches must save."""


class SideBySide:
    """Several kernels in one launch."""

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
            if reason := _alone(ir, region, plans[key].config):
                raise IllegalAction(f"side-by-side: {reason}")
        kept = tuple(group for group in schedule.beside if not set(group) & set(named))
        changed = replace(schedule, beside=(*kept, *groups))
        try:
            launches(ir, changed)
        except CannotCode:
            raise IllegalAction("side-by-side: one of the kernels needs what another makes") from None
        return changed

    def propose(self, situation: Situation) -> Iterable[MacroAction]:
        """All launches at once that can be shared by short kernels."""
        schedule, ir = situation.schedule, situation.ir
        if not situation.has_gpu or len(schedule.kernels) < 2 or schedule.cuda_graph:
            return
        groups = _shared(situation)
        plans = {plan.key: plan for plan in schedule.kernels}
        nodes = tuple(name for group in groups for key in group for name in plans[key].nodes)
        if not groups or any(s.action.kind is self.kind and s.action.region == nodes for s in situation.history):
            return
        lines, place = where(ir, nodes)
        kernels = sum(len(group) for group in groups)
        word = "one launch" if len(groups) == 1 else f"{len(groups)} launches"
        action = MacroAction(
            kind=self.kind,
            region=nodes,
            lines=lines,
            params={"launches": [list(group) for group in groups]},
            rationale="They do not wait for one another, and each is short: together they take the host fewer launches, and "
            "programs of one fill the device while the last ones of another run.",
            text=f"run {kernels} kernels of {place} side by side, in {word}",
        )
        after = self.apply(situation.graph, schedule, action)
        action = replace(action, expected=expected(situation.present, situation.cost(after)))
        if action.expected.saved_us >= LEAST_SHARE * situation.present.us:
            yield action


def _groups(action: MacroAction) -> tuple[tuple[str, ...], ...]:
    asked = action.params.get("launches")
    groups = tuple(tuple(map(str, group)) for group in asked) if isinstance(asked, (list, tuple)) else ()
    if not groups or any(not 1 < len(group) <= MOST_BESIDE for group in groups):
        raise IllegalAction(f"side-by-side: a launch is shared by 2 to {MOST_BESIDE} kernels")
    return groups


def _alone(ir: KernelIR, region: Region, config: KernelConfig) -> str:
    """Why a kernel cannot share a launch; empty where it can."""
    if not isinstance(config, (TileConfig, MatmulConfig)):
        return f"the launches of {region.kind.value} kernels are their own"
    if config.persist:
        return "a persistent kernel fills the device by itself"
    if config.is_split:
        return "a split kernel is several launches"
    if isinstance(config, MatmulConfig) and config.precision in SPLIT_PRECISION_MODES:
        own = product_in(ir, region)
        return "" if has_split_operands(own) else "a product of split operands is several launches"
    return ""


def _shared(situation: Situation) -> list[tuple[str, ...]]:
    """Short kernels that could share launches, by the order in which they run."""
    ir, schedule, device = situation.ir, situation.schedule, situation.device
    try:
        found = launches(ir, schedule)
    except CannotCode:
        return []
    order = _Order(ir, found)
    groups: list[list[int]] = []
    warps: dict[int, int] = {}
    for i, launch in enumerate(found):
        [unit, *others] = launch
        if others or unit.plan is None or unit.region is None:
            continue
        us = kernel_cost(ir, unit.region, unit.plan.config, device).us
        if _alone(ir, unit.region, unit.plan.config) or us > (LONGEST + 1) * device.launch_us:
            continue
        warps[i] = unit.plan.config.warps
        for members in groups:
            asked = [warps[each] for each in (*members, i)]
            alike = max(asked) <= MOST_TIMES_WARPS * min(asked)
            if alike and len(members) < MOST_BESIDE and order.may_join(members[0], i):
                members.append(i)
                order.join(members)
                break
        else:
            groups.append([i])
    keys = [[unit.plan.key for i in members for unit in found[i] if unit.plan] for members in groups]
    return [tuple(group) for group in keys if len(group) > 1]


class _Order:
    """Which launches come before which, over any path; those that are joined are one."""

    def __init__(self, ir: KernelIR, found: Sequence[Sequence[Unit]]) -> None:
        place = {name: i for i, launch in enumerate(found) for unit in launch for name in unit.nodes}
        named = ir.graph.named
        self._before = [0] * len(found)
        """By launch, a set of bits: those that it waits for."""
        drawn = 0
        for i, launch in enumerate(found):
            # Launches come in an order in which what one waits for stands before it.
            names = {name for unit in launch for name in unit.computed}
            sources = {place[ref.name] for name in names for ref in named[name].inputs() if ref.name in place} - {i}
            if any(named[name].draws for name in names):
                sources |= {drawn - 1} if drawn else set()
                drawn = i + 1
            for source in sources:
                self._before[i] |= self._before[source] | 1 << source

    def may_join(self, first: int, second: int) -> bool:
        """Whether neither waits for the other."""
        return not (self._before[first] >> second & 1 or self._before[second] >> first & 1)

    def join(self, members: Sequence[int]) -> None:
        """Make one launch of several: each waits for what any waits for, and whatever waits for one waits for all."""
        bits = own = 0
        for member in members:
            bits |= self._before[member]
            own |= 1 << member
        for member in members:
            self._before[member] = bits
        for i, before in enumerate(self._before):
            if before & own:
                self._before[i] = before | bits | own
