"""The order in which the launcher of a schedule runs kernels and torch calls."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from mtmc_lsp.capture.neutral_operations import earlier_tensor
from mtmc_lsp.core.graph import Graph, Ref
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.ir.known_regions import known_region
from mtmc_lsp.ir.primitives import KernelIR
from mtmc_lsp.ir.regions import VIEWS, CannotFuse, Region, RegionKind
from mtmc_lsp.schedule.configs import LoopConfig
from mtmc_lsp.schedule.schedule import KernelPlan, Schedule

LOADS_ITS_INPUTS = (RegionKind.MAP, RegionKind.REDUCE, RegionKind.SCAN, RegionKind.MATMUL)
"""Kernels that read nothing but the inputs of their region."""


@dataclass(frozen=True)
class Unit:
    """One kernel, or one torch call."""

    nodes: tuple[str, ...]
    plan: KernelPlan | None = None
    region: Region | None = None

    @property
    def computed(self) -> tuple[str, ...]:
        """Its nodes and the nodes that it recomputes."""
        return (*self.nodes, *self.plan.recomputed) if self.plan else self.nodes


def units(ir: KernelIR, schedule: Schedule) -> list[Unit]:
    """Kernels and torch calls in topological order; kernels that share a launch are adjacent.

    Raises:
        CannotCode: the nodes of a kernel cannot be fused, or two kernels depend on each other.
    """
    return [unit for launch in launches(ir, schedule) for unit in launch]


def launches(ir: KernelIR, schedule: Schedule) -> list[list[Unit]]:
    """Units in topological order, grouped by launch; each torch call is alone.

    Raises:
        CannotCode: as for :func:`units`.
    """
    graph = ir.graph
    pending = _grouped_by_launch(_needed_units(ir, schedule), schedule)
    launch_of = {name: i for i, launch in enumerate(pending) for unit in launch for name in unit.nodes}
    waits = [
        {launch_of[name] for unit in launch for name in _sources(ir, unit) if name in launch_of} for launch in pending
    ]
    # Random numbers are drawn in the user's order.
    drawn = [launch_of[node.name] for node in graph.nodes if node.draws]
    for before, after in itertools.pairwise(drawn):
        if before != after:
            waits[after].add(before)
    readers: list[list[int]] = [[] for _ in pending]
    for i, sources in enumerate(waits):
        for source in sources:
            readers[source].append(i)
    ready = [i for i, sources in enumerate(waits) if not sources]
    ordered: list[list[Unit]] = []
    while ready:
        # The first ready launch in graph order.
        i = heapq.heappop(ready)
        ordered.append(pending[i])
        for reader in readers[i]:
            waits[reader].discard(i)
            if not waits[reader]:
                heapq.heappush(ready, reader)
    if len(ordered) < len(pending):
        raise CannotCode("two kernels depend on each other's results")
    return ordered


def launch_count(ir: KernelIR, schedule: Schedule) -> int:
    """Launches of kernels and torch calls, without views.

    Raises:
        CannotCode: as for :func:`units`.
    """
    return sum(_count(ir, launch[0]) for launch in launches(ir, schedule))


def _count(ir: KernelIR, unit: Unit) -> int:
    """Launches of the first unit of a launch."""
    if unit.plan is None:
        return int(ir.graph.named[unit.nodes[0]].op.split(".")[1] not in VIEWS)
    if not (isinstance(unit.plan.config, LoopConfig) and unit.plan.config.is_stepwise):
        return 1
    loops = (loop for name in unit.nodes if (loop := ir.graph.named[name].loop) is not None)
    return sum(loop.count.value(ir.graph.sizes) for loop in loops)


def _needed_units(ir: KernelIR, schedule: Schedule) -> list[Unit]:
    """Every live unit, in graph order of its first node."""
    unit_of: dict[str, Unit] = {}
    graph = ir.graph
    for plan in schedule.kernels:
        try:
            unit = Unit(plan.nodes, plan, known_region(ir, plan.nodes, plan.recomputed))
        except CannotFuse as reason:
            raise CannotCode(str(reason)) from None
        for name in plan.nodes:
            unit_of[name] = unit
    for node in graph.nodes:
        unit_of.setdefault(node.name, Unit((node.name,)))
    needed = _live_nodes(ir, unit_of)
    live_units = {id(unit_of[node.name]): unit_of[node.name] for node in graph.nodes if node.name in needed}
    return list(live_units.values())


def _grouped_by_launch(live_units: Sequence[Unit], schedule: Schedule) -> list[list[Unit]]:
    """The units by launch, at the position of each launch's first kernel."""
    group_of = {key: i for i, group in enumerate(schedule.launches) for key in group}
    by_group: dict[int, list[Unit]] = {}
    ordered: list[list[Unit]] = []
    for unit in live_units:
        group = group_of.get(unit.plan.key) if unit.plan is not None else None
        if group is not None and group in by_group:
            by_group[group].append(unit)
            continue
        ordered.append([unit])
        if group is not None:
            by_group[group] = ordered[-1]
    return ordered


def read_nodes(ir: KernelIR, unit: Unit) -> set[str]:
    """The nodes whose values a unit reads.

    A kernel reads the operand of a copy or of a view that changes nothing, not its result, and no positions, which it computes.
    """
    graph = ir.graph
    if unit.region is None or unit.region.kind not in LOADS_ITS_INPUTS or unit.region.parts:
        refs = {ref for name in unit.computed for ref in graph.node(name).inputs()}
        if unit.plan is None:
            refs = {earlier_tensor(graph, ref) for ref in refs}
        return {ref.name for ref in refs} - set(unit.computed)
    return {ir.prims[name].origin for name in unit.region.inputs} - set(unit.computed)


def _sources(ir: KernelIR, unit: Unit) -> set[str]:
    """The nodes that must be computed before a unit, if they are computed at all."""
    nodes = ir.graph.named
    operands = {ref.name for name in unit.computed for ref in nodes[name].inputs()}
    return (operands | read_nodes(ir, unit)) - set(unit.computed)


def _returned(graph: Graph) -> set[Ref]:
    """The values that a launcher returns, each as the first value that is the same tensor.

    An input, or a tensor that is returned already, is returned as a view, as in eager mode.
    """
    returned = set(graph.outputs)
    for ref in graph.outputs:
        earlier = earlier_tensor(graph, ref)
        if earlier not in returned and earlier.name in graph.named:
            returned = returned - {ref} | {earlier}
    return returned


def _live_nodes(ir: KernelIR, unit_of: dict[str, Unit]) -> set[str]:
    """Nodes that are returned, mutate an input or draw random numbers, and the nodes that they read."""
    graph = ir.graph
    nodes = graph.named
    pending = [ref.name for ref in _returned(graph)] + [mutation.value.name for mutation in graph.mutations]
    pending += [node.name for node in graph.nodes if node.draws]
    live: set[str] = set()
    while pending:
        name = pending.pop()
        if name in live or name not in nodes:
            continue
        unit = unit_of[name]
        live |= set(unit.nodes)
        pending += read_nodes(ir, unit)
    return live
