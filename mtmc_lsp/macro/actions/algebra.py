"""Algebra: exact rewrites of the graph (:mod:`mtmc_lsp.macro.rewrites`), each with its own proof.

*Legal* when the rewrite's rule matches, nobody else reads what it removes, the caller cannot tell an alias from a copy, and
every kernel that it touches is still one kernel. The real numbers that come out are the same; where a rounding goes or
changes place, verification against float64 decides as for every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.graph import Graph, Node
from mtmc_lsp.macro.actions.base import IllegalAction, Situation, program_for, region_of, where, with_saving
from mtmc_lsp.macro.cost import matmul_flops
from mtmc_lsp.macro.fusion import Fusion, FusionSearch
from mtmc_lsp.macro.prims import Program
from mtmc_lsp.macro.rewrites import ALGEBRA, algebra_edit
from mtmc_lsp.macro.rewrites.editing import AlgebraRule, CannotRewrite, Edit
from mtmc_lsp.macro.schedule import KernelPlan, Rewrite, Schedule

LEAST_US = 0.05
"""A smaller predicted saving is noise of the model."""


class Algebra:
    """One exact rewrite, and kernels for the operations that it adds."""

    kind = ActionKind.ALGEBRA
    rules: Sequence[AlgebraRule] = ALGEBRA
    most = 1000
    """Matches that are weighed at a time."""
    same = "the result is the same by algebra"
    changes_rounding = False

    def suits(self, situation: Situation, rule: AlgebraRule, node: Node) -> bool:
        """Whether a rule is worth weighing for a node, whatever it looks like."""
        return True

    def apply(self, graph: Graph, schedule: Schedule, action: MacroAction) -> Schedule:
        """The schedule on the rewritten graph."""
        rewrite = Rewrite(str(action.params.get("rule", "")), str(action.params.get("node", "")))
        changed = _rewritten(graph, schedule, rewrite)
        program = program_for(graph, changed)
        kernels = action.params.get("kernels")
        for item in kernels if isinstance(kernels, (list, tuple)) else ():
            plan = KernelPlan(tuple(item["nodes"]), dict(item["config"]))
            changed = changed.with_kernel(replace(plan, nodes=region_of(program, plan).nodes))
        return changed

    def propose(self, situation: Situation) -> Iterable[MacroAction]:
        """Every rewrite that leaves less to do than fusion alone could."""
        graph = situation.program.graph
        if self.changes_rounding and (situation.strict or not situation.measured):
            # Without a GPU the user's own code is not rounded as it will be there, so nothing could be verified.
            return
        heaviest = sorted(graph.nodes, key=lambda node: -matmul_flops(situation.program, node.name))
        found = (
            (rule.name, edit)
            for node in heaviest
            for rule in self.rules
            if self.suits(situation, rule, node) and (edit := rule.match(graph, node))
        )
        matches = list(islice(found, self.most))
        if not matches:
            return
        least = _fused_cost(situation, situation.schedule)[0]
        for name, edit in matches:
            action = self._action(situation, Rewrite(name, edit.node), edit, least)
            if action is not None and action.expected.saved_us > LEAST_US:
                yield action

    def _action(self, situation: Situation, rewrite: Rewrite, edit: Edit, least: float) -> MacroAction | None:
        """The action, where even the fused program costs more than ``least`` without it."""
        program = situation.program
        try:
            base = _rewritten(situation.graph, situation.schedule, rewrite)
            after_us, fusions = _fused_cost(situation, base)
            if least - after_us <= LEAST_US:
                return None
            left = {node.name for node in program_for(situation.graph, base).graph.nodes}
            gone = tuple(node.name for node in program.graph.nodes if node.name not in left)
            added = {node.name for node in edit.added}
            # The new operations run as kernels at once, or there might be nothing of ours to verify.
            kernels = [{"nodes": list(f.region.nodes), "config": f.config} for f in fusions if f.nodes & added]
            lines, place = where(program, gone)
            action = MacroAction(
                kind=self.kind,
                region=gone,
                lines=lines,
                params={"rule": rewrite.rule, "node": rewrite.node, "kernels": kernels},
                rationale=f"{edit.why[:1].upper()}{edit.why[1:]}; {self.same}.",
                text=f"{edit.text} in {place}",
                changes_rounding=self.changes_rounding,
            )
            after = self.apply(situation.graph, situation.schedule, action)
            return with_saving(situation, action, after) if after.kernels else None
        except IllegalAction:
            return None


def _fused_cost(situation: Situation, schedule: Schedule) -> tuple[float, list[Fusion]]:
    """What a schedule would cost with the best fusions added, and these: what algebra must be better than."""
    program = program_for(situation.graph, schedule)
    left = situation.precisions_of(program)
    fusions = FusionSearch(program, schedule, situation.device, lambda node: left.mode(node, 0)).best()
    return situation.cost(schedule).us - sum(fusion.saved_us for fusion in fusions), fusions


def _rewritten(graph: Graph, schedule: Schedule, rewrite: Rewrite) -> Schedule:
    """The schedule with one more rewrite; kernels lose the nodes that go, and take in what stands for them."""
    before = program_for(graph, schedule)
    try:
        edit = algebra_edit(before.graph, rewrite)
    except CannotRewrite as reason:
        raise IllegalAction(str(reason)) from None
    rewrites = (*schedule.rewrites, rewrite)
    after = program_for(graph, Schedule(rewrites=rewrites))
    alive = {node.name: node for node in after.graph.nodes}
    kernels = [_kept(before, after, plan, edit, alive) for plan in schedule.kernels]
    return Schedule(tuple(plan for plan in kernels if plan is not None), rewrites)


def _kept(
    before: Program, after: Program, plan: KernelPlan, edit: Edit, alive: Mapping[str, Node]
) -> KernelPlan | None:
    """A kernel on the rewritten graph; None where nothing of it is left."""
    if edit.node not in plan.nodes and set(plan.nodes) | set(plan.recomputed) <= set(alive):
        region_of(after, plan)
        return plan
    own = tuple(name for name in plan.nodes if name in alive)
    again = tuple(name for name in plan.recomputed if name in alive)
    added = tuple(node.name for node in edit.added if node.name in alive)
    choices = [own]
    if edit.node in plan.nodes:
        choices.insert(0, (*own, *added))
    elif edit.node in plan.recomputed:
        again = (*again, *added)
    kind = region_of(before, plan).kind
    for nodes in choices:
        if not nodes:
            return None
        try:
            region = region_of(after, KernelPlan(nodes, {}, again))
        except IllegalAction:
            continue
        # Another kind of kernel has other choices: it starts from its own first configuration.
        return KernelPlan(region.nodes, plan.config if region.kind is kind else {}, again)
    raise IllegalAction("a kernel that the rewrite touches would no longer be one kernel")
