"""What a schedule makes the launcher do: which kernels and torch calls run, in which order."""

from __future__ import annotations

from dataclasses import dataclass

from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.macro.prims import Program
from mtmc_lsp.macro.regions import CannotFuse, Region, analyse
from mtmc_lsp.macro.schedule import KernelPlan, Schedule


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


def units(program: Program, schedule: Schedule) -> list[Unit]:
    """Kernels and torch calls in an order in which every value is made before it is read.

    Raises:
        CannotCode: a kernel of the schedule is none, or two kernels wait for each other.
    """
    made: dict[str, Unit] = {}
    for plan in schedule.kernels:
        try:
            unit = Unit(plan.nodes, plan, analyse(program, plan.nodes, plan.recomputed))
        except CannotFuse as reason:
            raise CannotCode(str(reason)) from None
        for name in plan.nodes:
            made[name] = unit
    pending: list[Unit] = []
    for node in program.graph.nodes:
        unit = made.setdefault(node.name, Unit((node.name,)))
        if unit not in pending:
            pending.append(unit)
    needed = _live_nodes(program, made)
    pending = [unit for unit in pending if set(unit.nodes) & needed]
    done = {item.name for item in program.graph.inputs}
    ordered: list[Unit] = []
    while pending:
        ready = next((unit for unit in pending if _sources(program, unit) <= done), None)
        if ready is None:
            raise CannotCode("two kernels wait for each other's results")
        pending.remove(ready)
        ordered.append(ready)
        done |= set(ready.nodes)
    return ordered


def _sources(program: Program, unit: Unit) -> set[str]:
    nodes = {node.name: node for node in program.graph.nodes}
    return {ref.name for name in unit.computed for ref in nodes[name].inputs()} - set(unit.computed)


def _live_nodes(program: Program, made: dict[str, Unit]) -> set[str]:
    """Nodes whose values are returned, mutate an input, or are read by such."""
    graph = program.graph
    nodes = {node.name: node for node in graph.nodes}
    pending = [ref.name for ref in graph.outputs if ref] + [mutation.value.name for mutation in graph.mutations]
    live: set[str] = set()
    while pending:
        name = pending.pop()
        if name in live or name not in nodes:
            continue
        unit = made[name]
        live |= set(unit.nodes)
        pending += _sources(program, unit)
    return live
