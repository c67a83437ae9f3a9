"""Recompute: a cheap value is computed again by each kernel that reads it, instead of being written once and read often.

*Legal* when the value (and what it is made of inside its kernel) is elementwise, draws no random numbers, is not returned, and
all who read it can be kernels with it inside. The same operations on the same operands give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mtmc_lsp.actions.base import (
    IllegalAction,
    Situation,
    ir_for,
    least_gain_us,
    new_plan,
    operation_names,
    region_of,
    size_text,
    where,
    with_saving,
)
from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.graph import Graph, Node
from mtmc_lsp.ir.primitives import VIEW_OPS, KernelIR, PrimOp
from mtmc_lsp.rewrites.graph_editing import is_returned, readers
from mtmc_lsp.schedule.schedule import KernelPlan, Schedule
from mtmc_lsp.tuning.cost import tensor_bytes

CHEAP = VIEW_OPS | {PrimOp.POINTWISE, PrimOp.CONSTANT, PrimOp.IOTA}
MUCH_WORK = 20_000
"""Nodes in all versions of the target that are weighed; of a large one, only values that others read, the largest first."""


class Recompute:
    """A value out of memory and into its readers."""

    kind = ActionKind.RECOMPUTE

    def apply(self, graph: Graph, schedule: Schedule, action: MacroAction) -> Schedule:
        """The value's kernel no longer writes it, and its readers compute it."""
        ir = ir_for(graph, schedule)
        node = str(action.params.get("node", ""))
        if not any(own.name == node for own in ir.graph.nodes):
            raise IllegalAction(f"recompute: there is no {node}")
        chain = _chain(ir, schedule, node)
        _check(ir, chain, schedule.kernel_of(node))
        readers_of = {reader.name for name in chain for reader in readers(ir.graph, name)} - set(chain)
        kernels = []
        for plan in schedule.kernels:
            own = tuple(name for name in plan.nodes if name not in chain)
            if not own:
                continue
            needs = bool(readers_of & (set(own) | set(plan.recomputed)))
            again = tuple(dict.fromkeys((*plan.recomputed, *chain))) if needs else plan.recomputed
            changed = replace(plan, nodes=own, recomputed=again)
            if changed != plan and region_of(ir, changed).kind is not region_of(ir, plan).kind:
                raise IllegalAction("recompute: a reader would become another kind of kernel")
            kernels.append(changed)
        kernels += _new_kernels(ir, schedule, readers_of, chain)
        return replace(schedule, kernels=tuple(kernels))

    def propose(self, situation: Situation) -> Iterable[MacroAction]:
        """Values whose writing and reading costs more than computing them again."""
        ir = situation.ir
        for node in _candidates(ir, situation.schedule):
            if situation.is_late:
                return
            lines, place = where(ir, [node.name])
            size = tensor_bytes(node.type, ir.graph.sizes)
            action = MacroAction(
                kind=self.kind,
                region=(node.name,),
                lines=lines,
                params={"node": node.name},
                rationale=(
                    f"{size_text(size)} need not be written and read again: "
                    "each kernel that needs the value computes it from what it reads anyway."
                ),
                text=f"recompute the {operation_names(ir, [node.name])} of {place} in each kernel that reads it",
            )
            try:
                after = self.apply(situation.graph, situation.schedule, action)
                action = with_saving(situation, action, after)
            except IllegalAction:
                continue
            if action.expected.saved_us > least_gain_us(situation.device):
                yield action


def _candidates(ir: KernelIR, schedule: Schedule) -> list[Node]:
    """The nodes that are worth weighing."""
    graph = ir.graph
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


def _new_kernels(ir: KernelIR, schedule: Schedule, names: Iterable[str], chain: tuple[str, ...]) -> list[KernelPlan]:
    """Readers that are torch calls so far, each as a kernel that computes the value for itself."""
    order = [node.name for node in ir.graph.nodes]
    loose = [name for name in order if name in set(names) and schedule.kernel_of(name) is None]
    again = {name for plan in schedule.kernels for name in plan.recomputed}
    return [new_plan(ir, (name,), recomputed=chain) for name in loose if name not in again]


def _chain(ir: KernelIR, schedule: Schedule, node: str) -> tuple[str, ...]:
    """The node and what it is made of inside its own kernel, in execution order."""
    plan = schedule.kernel_of(node)
    inside = set(plan.nodes) if plan else {node}
    nodes = {own.name: own for own in ir.graph.nodes}
    found: set[str] = set()
    pending = [node]
    while pending:
        name = pending.pop()
        if name in inside and name not in found:
            found.add(name)
            pending += [ref.name for ref in nodes[name].inputs()]
    return tuple(name for name in nodes if name in found)


def _check(ir: KernelIR, chain: tuple[str, ...], owner: KernelPlan | None) -> None:
    graph = ir.graph
    for name in chain:
        if name in ir.opaque or any(prim.op not in CHEAP for prim in ir.of_node(name)):
            raise IllegalAction("recompute: only elementwise work is cheap enough to do again")
        if is_returned(graph, name):
            raise IllegalAction("recompute: the value is a result, so it is written anyway")
        if any(reader.name in ir.opaque for reader in readers(graph, name)):
            raise IllegalAction("recompute: a torch call reads the value")
    outside = {r.name for name in chain for r in readers(graph, name)} - set(chain)
    if owner is not None and outside <= set(owner.nodes):
        raise IllegalAction("recompute: nobody else reads the value")
