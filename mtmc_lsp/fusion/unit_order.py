"""Which nodes of a new kernel other kernels of the schedule must run between.

A region is convex as a set of nodes, but a kernel computes all of its nodes at once: another kernel may read one value of the
region, and compute, from other operands, a value that the region reads. Then each would have to run before the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mtmc_lsp.schedule.schedule import Schedule

Sources = Mapping[str, Sequence[str]]
"""For each node of a graph, in execution order, the nodes that it reads."""


def parts_in_order(sources: Sources, schedule: Schedule, nodes: frozenset[str]) -> list[frozenset[str]]:
    """The nodes if they can run as one kernel; otherwise those that run before the kernels in between, and those after them."""
    later = _after_others(sources, schedule, nodes)
    return [nodes - later, later] if later else [nodes]


def _after_others(sources: Sources, schedule: Schedule, nodes: frozenset[str]) -> frozenset[str]:
    """Those of the nodes that depend on another kernel which depends on one of them."""
    joined = [plan for plan in schedule.kernels if nodes & set(plan.nodes)]
    unit_of: dict[str, tuple[str, ...]] = {}
    for plan in schedule.kernels:
        if plan not in joined:
            unit_of |= dict.fromkeys(plan.nodes, (*plan.nodes, *plan.recomputed))
    if not unit_of:
        return frozenset()
    own = nodes | {name for plan in joined for name in plan.recomputed}
    # What the nodes depend on, unit by unit.
    before, pending = dict[str, set[str]](), [name for inside in own for name in sources[inside]]
    while pending:
        name = pending.pop()
        if name in own or name in before:
            continue
        unit = unit_of.get(name, (name,))
        read = {source for member in unit for source in sources[member]}.difference(unit)
        before |= dict.fromkeys(unit, read)
        pending += read
    # Of these, what depends on the nodes.
    between = {name for name, read in before.items() if read & nodes}
    while more := {name for name, read in before.items() if name not in between and read & between}:
        between |= more
    if not between:
        return frozenset()
    later = set[str]()
    for name in sources:
        if name in own and (between | later).intersection(sources[name]):
            later.add(name)
    # A kernel of the schedule stays whole.
    for plan in joined:
        if later & set(plan.nodes):
            later |= set(plan.nodes)
    return frozenset(later & nodes)
