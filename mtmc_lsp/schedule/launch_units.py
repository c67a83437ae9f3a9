"""What a schedule makes the launcher do: which kernels and torch calls run, in which order."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.ir.primitives import KernelIR
from mtmc_lsp.ir.regions import CannotFuse, Region, analyse
from mtmc_lsp.schedule.schedule import KernelPlan, Schedule


@dataclass(frozen=True)
class Unit:
    """One thing the launcher does: run a kernel, or make one torch call."""

    nodes: tuple[str, ...]
    plan: KernelPlan | None = None
    region: Region | None = None

    @property
    def computed(self) -> tuple[str, ...]:
        """Its nodes, and those that it computes again for itself."""
        return (*self.nodes, *self.plan.recomputed) if self.plan else self.nodes


def units(ir: KernelIR, schedule: Schedule) -> list[Unit]:
    """Kernels and torch calls in an order in which every value is made before it is read.

    Kernels that share a launch follow one another.

    Raises:
        CannotCode: a kernel of the schedule is none, or two kernels wait for each other.
    """
    return [unit for launch in launches(ir, schedule) for unit in launch]


def launches(ir: KernelIR, schedule: Schedule) -> list[list[Unit]]:
    """As :func:`units`, the kernels that share a launch together; each torch call is alone.

    Raises:
        CannotCode: likewise.
    """
    graph = ir.graph
    pending = _together(_found(ir, schedule), schedule)
    place = {name: i for i, launch in enumerate(pending) for unit in launch for name in unit.nodes}
    waits = [{place[name] for unit in launch for name in _sources(ir, unit) if name in place} for launch in pending]
    # Random numbers are drawn in the user's own order.
    drawn = [place[node.name] for node in graph.nodes if node.draws]
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
        # Of all that can run, what comes first in the graph.
        i = heapq.heappop(ready)
        ordered.append(pending[i])
        for reader in readers[i]:
            waits[reader].discard(i)
            if not waits[reader]:
                heapq.heappush(ready, reader)
    if len(ordered) < len(pending):
        raise CannotCode("two kernels wait for each other's results")
    return ordered


def _found(ir: KernelIR, schedule: Schedule) -> list[Unit]:
    """Every unit that is needed, in the order in which the graph begins them."""
    made: dict[str, Unit] = {}
    graph = ir.graph
    for plan in schedule.kernels:
        try:
            unit = Unit(plan.nodes, plan, analyse(ir, plan.nodes, plan.recomputed))
        except CannotFuse as reason:
            raise CannotCode(str(reason)) from None
        for name in plan.nodes:
            made[name] = unit
    for node in graph.nodes:
        made.setdefault(node.name, Unit((node.name,)))
    needed = _live_nodes(ir, made)
    found = {id(made[node.name]): made[node.name] for node in graph.nodes if node.name in needed}
    return list(found.values())


def _together(found: Sequence[Unit], schedule: Schedule) -> list[list[Unit]]:
    """The units by launch; a launch stands where its first kernel stood."""
    group_of = {key: i for i, group in enumerate(schedule.launches) for key in group}
    together: dict[int, list[Unit]] = {}
    ordered: list[list[Unit]] = []
    for unit in found:
        group = group_of.get(unit.plan.key) if unit.plan is not None else None
        if group is not None and group in together:
            together[group].append(unit)
            continue
        ordered.append([unit])
        if group is not None:
            together[group] = ordered[-1]
    return ordered


def _sources(ir: KernelIR, unit: Unit) -> set[str]:
    nodes = ir.graph.named
    return {ref.name for name in unit.computed for ref in nodes[name].inputs()} - set(unit.computed)


def _live_nodes(ir: KernelIR, made: dict[str, Unit]) -> set[str]:
    """Nodes whose values are returned, mutate an input, or are read by such, and those that draw random numbers."""
    graph = ir.graph
    nodes = graph.named
    pending = [ref.name for ref in graph.outputs] + [mutation.value.name for mutation in graph.mutations]
    pending += [node.name for node in graph.nodes if node.draws]
    live: set[str] = set()
    while pending:
        name = pending.pop()
        if name in live or name not in nodes:
            continue
        unit = made[name]
        live |= set(unit.nodes)
        pending += _sources(ir, unit)
    return live
