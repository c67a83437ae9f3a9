"""Recompute: each kernel that reads a cheap value computes it again, instead of loading it from memory.

*Legal* when the value (and its operands inside its kernel) is elementwise, draws no random numbers, is not returned, and all
its readers can be kernels that contain it. The same operations on the same operands give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mtmc_lsp.actions.base import (
    IllegalAction,
    Situation,
    ir_for,
    least_gain_us,
    lines_of,
    named_configs,
    new_plan,
    region_of,
    size_text,
    with_saving,
)
from mtmc_lsp.actions.titles import result_name
from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.graph import Graph, Node
from mtmc_lsp.ir.primitives import CHEAP, KernelIR
from mtmc_lsp.rewrites.graph_editing import is_returned, readers
from mtmc_lsp.schedule.schedule import KernelPlan, Schedule
from mtmc_lsp.tuning.cost import tensor_bytes

MUCH_WORK = 20_000
"""Bound on candidates times nodes of the target. Large targets consider only values that other kernels read, largest first."""


class Recompute:
    """Computes a value in its readers."""

    kind = ActionKind.RECOMPUTE

    def apply(self, graph: Graph, schedule: Schedule, action: MacroAction) -> Schedule:
        """The value's kernel no longer writes it, and its readers compute it."""
        ir = ir_for(graph, schedule)
        node = str(action.params.get("node", ""))
        if not any(other.name == node for other in ir.graph.nodes):
            raise IllegalAction(f"recompute: the graph has no node {node}")
        chain = _chain(ir, schedule, node)
        _check(ir, chain, schedule.kernel_of(node))
        readers_of = {reader.name for name in chain for reader in readers(ir.graph, name)} - set(chain)
        kernels = []
        for plan in schedule.kernels:
            remaining = tuple(name for name in plan.nodes if name not in chain)
            if not remaining:
                continue
            needs = bool(readers_of & (set(remaining) | set(plan.recomputed)))
            again = tuple(dict.fromkeys((*plan.recomputed, *chain))) if needs else plan.recomputed
            changed = replace(plan, nodes=remaining, recomputed=again)
            if changed != plan and region_of(ir, changed).kind is not region_of(ir, plan).kind:
                raise IllegalAction("recompute: a reader would become another kind of kernel")
            kernels.append(changed)
        kernels += _new_kernels(ir, schedule, readers_of, chain, action.params.get("kernels"))
        return replace(schedule, kernels=tuple(kernels))

    def propose(self, situation: Situation) -> Iterable[MacroAction]:
        """Values whose writing and reading costs more than computing them again."""
        ir = situation.ir
        for node in _candidates(ir, situation.schedule):
            if situation.is_late:
                return
            size = tensor_bytes(node.type, ir.graph.sizes)
            action = MacroAction(
                kind=self.kind,
                region=(node.name,),
                lines=lines_of(ir, [node.name]),
                params={"node": node.name},
                rationale=(
                    "Each kernel that reads the value computes it from operands that it loads anyway. The value, "
                    f"{size_text(size)}, is neither written to memory nor read from it."
                ),
                text=f"Recompute {result_name(ir, [node.name]) or node.word} in each kernel that reads it",
            )
            try:
                after = self.apply(situation.graph, situation.schedule, action)
                new = [plan for plan in after.kernels if situation.schedule.kernel_of(plan.key) is None]
                if named := named_configs(ir, new, situation.device):
                    action = replace(action, params={**action.params, "kernels": named})
                    after = self.apply(situation.graph, situation.schedule, action)
                action = with_saving(situation, action, after)
            except IllegalAction:
                continue
            if action.expected.saved_us > least_gain_us(situation.device):
                yield action


def _candidates(ir: KernelIR, schedule: Schedule) -> list[Node]:
    """The nodes whose recomputation is worth costing."""
    graph = ir.graph
    owners = {name: plan for plan in reversed(schedule.kernels) for name in plan.nodes}
    # Fusion handles values that no kernel writes yet.
    candidates = [node for node in graph.nodes if node.name in owners and readers(graph, node.name)]
    most = MUCH_WORK // max(1, len(graph.nodes))
    if len(candidates) <= most:
        return candidates
    inside = {plan.key: frozenset(plan.nodes) for plan in schedule.kernels}
    written = [
        node
        for node in candidates
        if any(reader.name not in inside[owners[node.name].key] for reader in readers(graph, node.name))
    ]
    return sorted(written, key=lambda node: -tensor_bytes(node.type, graph.sizes))[:most]


def _new_kernels(
    ir: KernelIR, schedule: Schedule, names: Iterable[str], chain: tuple[str, ...], named: object
) -> list[KernelPlan]:
    """Readers that are torch calls so far, each as a kernel that recomputes the value; ``named`` are configurations of them."""
    configs = {
        name: item["config"] for item in (named if isinstance(named, (list, tuple)) else ()) for name in item["nodes"]
    }
    order = [node.name for node in ir.graph.nodes]
    uncovered = [name for name in order if name in set(names) and schedule.kernel_of(name) is None]
    again = {name for plan in schedule.kernels for name in plan.recomputed}
    return [new_plan(ir, (name,), configs.get(name), chain) for name in uncovered if name not in again]


def _chain(ir: KernelIR, schedule: Schedule, node: str) -> tuple[str, ...]:
    """The node and its producers inside its kernel, in execution order."""
    plan = schedule.kernel_of(node)
    inside = set(plan.nodes) if plan else {node}
    nodes = {each.name: each for each in ir.graph.nodes}
    chain: set[str] = set()
    pending = [node]
    while pending:
        name = pending.pop()
        if name in inside and name not in chain:
            chain.add(name)
            pending += [ref.name for ref in nodes[name].inputs()]
    return tuple(name for name in nodes if name in chain)


def _check(ir: KernelIR, chain: tuple[str, ...], owner: KernelPlan | None) -> None:
    graph = ir.graph
    for name in chain:
        if name in ir.opaque or any(prim.op not in CHEAP for prim in ir.of_node(name)):
            raise IllegalAction("recompute: only elementwise operations are cheap enough to compute again")
        if is_returned(graph, name):
            raise IllegalAction("recompute: the value is returned, so it is written anyway")
        if any(reader.name in ir.opaque for reader in readers(graph, name)):
            raise IllegalAction("recompute: a torch call reads the value")
    outside = {r.name for name in chain for r in readers(graph, name)} - set(chain)
    if owner is not None and outside <= set(owner.nodes):
        raise IllegalAction("recompute: no other kernel reads the value")
