"""Recompute: a cheap value is computed again by each kernel that reads it, instead of being written once and read often.

*Legal* when the value (and what it is made of inside its kernel) is elementwise, draws no random numbers, is not returned, and
all who read it can be kernels with it inside. The same operations on the same operands give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.graph import Graph, Node
from mtmc_lsp.macro.actions.base import (
    IllegalAction,
    Situation,
    operation_names,
    program_for,
    region_of,
    size_text,
    where,
    with_saving,
)
from mtmc_lsp.macro.cost import tensor_bytes
from mtmc_lsp.macro.prims import VIEW_OPS, PrimOp, Program
from mtmc_lsp.macro.rewrites.editing import is_returned, readers
from mtmc_lsp.macro.schedule import KernelPlan, Schedule

CHEAP = VIEW_OPS | {PrimOp.POINTWISE, PrimOp.CONSTANT, PrimOp.IOTA}
LEAST_US = 0.05
MUCH_WORK = 20_000
"""Nodes in all versions of the target that are weighed; of a large one, only values that others read, the largest first."""


class Recompute:
    """A value out of memory and into its readers."""

    kind = ActionKind.RECOMPUTE

    def apply(self, graph: Graph, schedule: Schedule, action: MacroAction) -> Schedule:
        """The value's kernel no longer writes it, and its readers compute it."""
        program = program_for(graph, schedule)
        node = str(action.params.get("node", ""))
        if not any(own.name == node for own in program.graph.nodes):
            raise IllegalAction(f"recompute: there is no {node}")
        chain = _chain(program, schedule, node)
        _check(program, chain, schedule.kernel_of(node))
        readers_of = {reader.name for name in chain for reader in readers(program.graph, name)} - set(chain)
        kernels = []
        for plan in schedule.kernels:
            own = tuple(name for name in plan.nodes if name not in chain)
            if not own:
                continue
            needs = bool(readers_of & (set(own) | set(plan.recomputed)))
            again = tuple(dict.fromkeys((*plan.recomputed, *chain))) if needs else plan.recomputed
            changed = replace(plan, nodes=own, recomputed=again)
            if changed != plan and region_of(program, changed).kind is not region_of(program, plan).kind:
                raise IllegalAction("recompute: a reader would become another kind of kernel")
            kernels.append(changed)
        kernels += _new_kernels(program, schedule, readers_of, chain)
        return replace(schedule, kernels=tuple(kernels))

    def propose(self, situation: Situation) -> Iterable[MacroAction]:
        """Values whose writing and reading costs more than computing them again."""
        program = situation.program
        for node in _candidates(program, situation.schedule):
            if situation.is_late:
                return
            lines, place = where(program, [node.name])
            size = tensor_bytes(node.type, program.graph.sizes)
            action = MacroAction(
                kind=self.kind,
                region=(node.name,),
                lines=lines,
                params={"node": node.name},
                rationale=(
                    f"{size_text(size)} need not be written and read again: "
                    "each kernel that needs the value computes it from what it reads anyway."
                ),
                text=f"recompute the {operation_names(program, [node.name])} of {place} in each kernel that reads it",
            )
            try:
                after = self.apply(situation.graph, situation.schedule, action)
                action = with_saving(situation, action, after)
            except IllegalAction:
                continue
            if action.expected.saved_us > LEAST_US:
                yield action


def _candidates(program: Program, schedule: Schedule) -> list[Node]:
    """The nodes that are worth weighing."""
    graph = program.graph
    owners = {name: plan for plan in reversed(schedule.kernels) for name in plan.nodes}
    # What no kernel writes yet, fusion looks at first.
    found = [node for node in graph.nodes if node.name in owners and readers(graph, node.name)]
    most = MUCH_WORK // max(1, len(graph.nodes))
    if len(found) <= most:
        return found
    inside = {plan.key: frozenset(plan.nodes) for plan in schedule.kernels}
    written = [
        node
        for node in found
        if any(own.name not in inside[owners[node.name].key] for own in readers(graph, node.name))
    ]
    return sorted(written, key=lambda node: -tensor_bytes(node.type, graph.sizes))[:most]


def _new_kernels(
    program: Program, schedule: Schedule, names: Iterable[str], chain: tuple[str, ...]
) -> list[KernelPlan]:
    """Readers that are torch calls so far, each as a kernel that computes the value for itself."""
    order = [node.name for node in program.graph.nodes]
    loose = [name for name in order if name in set(names) and schedule.kernel_of(name) is None]
    again = {name for plan in schedule.kernels for name in plan.recomputed}
    plans = [KernelPlan((name,), {}, chain) for name in loose if name not in again]
    for plan in plans:
        region_of(program, plan)
    return plans


def _chain(program: Program, schedule: Schedule, node: str) -> tuple[str, ...]:
    """The node and what it is made of inside its own kernel, in execution order."""
    plan = schedule.kernel_of(node)
    inside = set(plan.nodes) if plan else {node}
    nodes = {own.name: own for own in program.graph.nodes}
    found: set[str] = set()
    pending = [node]
    while pending:
        name = pending.pop()
        if name in inside and name not in found:
            found.add(name)
            pending += [ref.name for ref in nodes[name].inputs()]
    return tuple(name for name in nodes if name in found)


def _check(program: Program, chain: tuple[str, ...], owner: KernelPlan | None) -> None:
    graph = program.graph
    for name in chain:
        if name in program.opaque or any(prim.op not in CHEAP for prim in program.of_node(name)):
            raise IllegalAction("recompute: only elementwise work is cheap enough to do again")
        if is_returned(graph, name):
            raise IllegalAction("recompute: the value is a result, so it is written anyway")
        if any(reader.name in program.opaque for reader in readers(graph, name)):
            raise IllegalAction("recompute: a torch call reads the value")
    outside = {r.name for name in chain for r in readers(graph, name)} - set(chain)
    if owner is not None and outside <= set(owner.nodes):
        raise IllegalAction("recompute: nobody else reads the value")
