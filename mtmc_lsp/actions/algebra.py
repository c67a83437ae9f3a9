"""Algebra: exact rewrites of the graph (:mod:`mtmc_lsp.rewrites`), each with its own proof.

*Legal* when the rewrite's rule matches, no other node reads what it removes, the caller cannot tell an alias from a copy, and
every affected kernel is still one kernel. The results are equal over the reals. Where rounding changes, verification against
float64 decides, as for every step.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace

from mtmc_lsp.actions.base import (
    IllegalAction,
    Situation,
    ir_for,
    least_gain_us,
    lines_of,
    new_plan,
    region_at,
    region_of,
    with_saving,
)
from mtmc_lsp.core.action import ActionKind, MacroAction, capitalized
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.graph import Graph, Node
from mtmc_lsp.core.json_codec import to_json
from mtmc_lsp.core.run import StepStatus
from mtmc_lsp.device.choice import default_model
from mtmc_lsp.fusion.repeated_blocks import form, groups_of_equal
from mtmc_lsp.fusion.search import FusionSearch
from mtmc_lsp.ir.lower import GraphBox
from mtmc_lsp.ir.primitives import KernelIR
from mtmc_lsp.rewrites import ALGEBRA, algebra_edit
from mtmc_lsp.rewrites.graph_editing import AlgebraRule, CannotRewrite, Edit
from mtmc_lsp.schedule.configs import SPLIT_PRECISION_MODES, precision_of
from mtmc_lsp.schedule.schedule import KernelPlan, Rewrite, Schedule
from mtmc_lsp.schedule.tile_configs import default_config
from mtmc_lsp.tuning.cost import matmul_flops

NEAR, MOST_NEAR = 6, 40
"""Distance from an edit, and number of nodes, beyond which fusions are assumed not to depend on it."""
MOST_FORMS = 12
"""Edits of different forms that are evaluated at a time, largest products first: each needs a fusion search."""


_GAIN_CACHE: dict[Hashable, bool] = {}
"""Cache: whether an edit has a gain, keyed by everything near it. Each step of a run asks again."""
MAX_CACHED_GAINS = 4096


class Algebra:
    """One exact rewrite, and kernels for the operations that it adds."""

    kind = ActionKind.ALGEBRA
    rules: Sequence[AlgebraRule] = ALGEBRA
    most = MOST_FORMS
    """Forms of matches that are evaluated at a time."""
    same = "the result is the same by algebra"

    def suits(self, situation: Situation, rule: AlgebraRule, node: Node) -> bool:
        """Whether a rule is worth evaluating for a node."""
        return True

    def apply(self, graph: Graph, schedule: Schedule, action: MacroAction) -> Schedule:
        """The schedule on the rewritten graph."""
        changed = schedule
        for node in nodes_of(action):
            rewrite = Rewrite(str(action.params.get("rule", "")), node)
            # The action names kernels that have another configuration on the planner's device.
            changed = _rewritten(graph, changed, rewrite, default_model())
        return with_kernels(ir_for(graph, changed), changed, action)

    def propose(self, situation: Situation) -> Iterable[MacroAction]:
        """Rewrites that save more than fusion alone."""
        graph = situation.ir.graph
        # Without a GPU the reference is not rounded as on the GPU, so such actions cannot be verified.
        must_be_exact = situation.strict or not situation.has_gpu
        rules = [rule for rule in self.rules if not (must_be_exact and rule.changes_rounding)]
        heaviest = sorted(graph.nodes, key=lambda node: -matmul_flops(situation.ir, node.name))
        matches = (
            (rule.name, edit)
            for node in heaviest
            for rule in rules
            if self.suits(situation, rule, node) and (edit := rule.match(graph, node))
        )
        groups = groups_of_equal(list(matches), lambda match: (match[0], _form(graph, match[1])))[: self.most]
        if not groups:
            return
        search = situation.search()
        tried = {(str(s.action.params.get("rule")), tuple(nodes_of(s.action))): s.status for s in situation.history}
        for group in groups:
            rule, edits = group[0][0], [edit for _, edit in group]
            # Edits of one form have similar gains, so one of them is evaluated.
            key = _cache_key(situation, Rewrite(rule, edits[0].node))
            if key not in _GAIN_CACHE:
                while len(_GAIN_CACHE) >= MAX_CACHED_GAINS:
                    del _GAIN_CACHE[next(iter(_GAIN_CACHE))]
                has_gain = self._has_gain(situation, Rewrite(rule, edits[0].node), edits[0], search)
                if situation.is_late:
                    # The searches were cut short, so the result is not valid.
                    return
                _GAIN_CACHE[key] = has_gain
            if not _GAIN_CACHE[key]:
                continue
            # If the edits failed together, one of them may be the cause.
            status = tried.get((rule, tuple(edit.node for edit in edits)))
            if len(edits) > 1 and status is StepStatus.REJECTED:
                continue
            for each in [[edit] for edit in edits] if status is StepStatus.FAILED else [edits]:
                action = self._action(situation, rule, each)
                if action is not None and action.expected.saved_us > least_gain_us(situation.device):
                    yield action

    def _has_gain(self, situation: Situation, rewrite: Rewrite, edit: Edit, search: FusionSearch) -> bool:
        """Whether the edit lowers the predicted cost, with the best fusions near it before and after."""
        graph = situation.ir.graph
        try:
            near = _around(graph, [edit.node])
            base = _rewritten(situation.graph, situation.schedule, rewrite, situation.device)
            ir = ir_for(situation.graph, base)
            added = {node.name for node in edit.added}
            after = situation.search_in(ir, base).best(near | added)
            gain = situation.present.us - situation.cost(base).us
        except IllegalAction:
            return False
        fused = sum(fusion.saved_us for fusion in after) - sum(fusion.saved_us for fusion in search.best(near))
        return gain + fused > least_gain_us(situation.device)

    def _action(self, situation: Situation, rule: str, edits: Sequence[Edit]) -> MacroAction | None:
        """The action for edits of one form, with kernels for their new operations."""
        ir = situation.ir
        try:
            base, applied = situation.schedule, list[Edit]()
            for edit in edits:
                now = ir_for(situation.graph, base).graph
                rewrite = Rewrite(rule, edit.node)
                # One edit may have removed the node of the next.
                if edit.node in now.named and (again := _match(now, rewrite)) is not None:
                    base = _rewritten(situation.graph, base, rewrite, situation.device)
                    applied.append(again)
            after_all = ir_for(situation.graph, base)
            search = situation.search_in(after_all, base)
            gone = tuple(node.name for node in ir.graph.nodes if node.name not in after_all.graph.named)
            added = {node.name for edit in applied for node in edit.added}
            # The new operations become kernels at once; otherwise there might be no kernel to verify.
            fusions = search.best(_around(after_all.graph, added & set(after_all.graph.named)))
            kernels = [{"nodes": list(f.region.nodes), "config": to_json(f.config)} for f in fusions if f.nodes & added]
            suffix = f", and at {len(applied) - 1} more places" if len(applied) > 1 else ""
            variable, title = ir.graph.node(applied[0].node).variable, capitalized(edits[0].text).rstrip(",")
            title = f"{title} for {variable}" if variable and variable not in title else title
            params: dict[str, object] = {"rule": rule, "node": applied[0].node, "kernels": kernels}
            rounded = any(each.changes_rounding for each in self.rules if each.name == rule)
            if suffix:
                params["nodes"] = [edit.node for edit in applied]
            action = MacroAction(
                kind=self.kind,
                region=gone,
                lines=lines_of(ir, gone),
                params=params,
                rationale=f"{capitalized(edits[0].why)}; {self.same}.",
                text=f"{title}{suffix}",
                changes_rounding=rounded or any(precision_of(f.config) in SPLIT_PRECISION_MODES for f in fusions),
            )
            after = self.apply(situation.graph, situation.schedule, action)
            if changed := _other_configs(base, after):
                action = replace(action, params={**params, "kernels": [*changed, *kernels]})
                after = self.apply(situation.graph, situation.schedule, action)
            return with_saving(situation, action, after) if after.kernels else None
        except IllegalAction:
            return None


def _other_configs(planned: Schedule, applied: Schedule) -> list[dict[str, object]]:
    """The parameters of an action for kernels that were planned with another configuration than they were applied with."""
    before = {plan.nodes: plan.config for plan in applied.kernels}
    return [
        {"nodes": list(plan.nodes), "config": to_json(plan.config)}
        for plan in planned.kernels
        if before.get(plan.nodes, plan.config) != plan.config and not plan.recomputed
    ]


def with_kernels(ir: KernelIR, schedule: Schedule, action: MacroAction) -> Schedule:
    """The schedule with the kernels that an action adds to its rewrite.

    Raises:
        IllegalAction: the nodes of one cannot be one kernel.
    """
    kernels = action.params.get("kernels")
    for item in kernels if isinstance(kernels, (list, tuple)) else ():
        schedule = schedule.with_kernel(new_plan(ir, item["nodes"], item["config"]))
    return schedule


def nodes_of(action: MacroAction) -> list[str]:
    """The nodes of an action's rewrites, in order."""
    names = action.params.get("nodes")
    return [str(node) for node in names] if isinstance(names, (list, tuple)) else [str(action.params.get("node", ""))]


def _match(graph: Graph, rewrite: Rewrite) -> Edit | None:
    try:
        return algebra_edit(graph, rewrite)
    except CannotRewrite:
        return None


def _cache_key(situation: Situation, rewrite: Rewrite) -> Hashable:
    """What the gain of an edit depends on: the graph, nearby kernels, failed steps and the device."""
    near = _around(situation.ir.graph, [rewrite.node])
    plans = (plan for plan in situation.schedule.kernels if near & set(plan.nodes))
    refused = tuple(step.action.key for step in situation.history if step.status is not StepStatus.ACCEPTED)
    setting = (situation.device.name, situation.device.bandwidth, situation.strict, refused)
    return GraphBox(situation.graph), situation.schedule.rewrites, rewrite, frozenset(plans), setting


def _form(graph: Graph, edit: Edit) -> Hashable:
    """A key of an edit's node, its sources and its readers; equal for repeated blocks."""
    node = graph.named[edit.node]
    sources = {ref.name for ref in node.inputs()} & set(graph.named)
    readers = frozenset(reader.op for reader in graph.readers(edit.node))
    return form(graph, {edit.node, *sources}), readers, tuple(item.op for item in edit.added)


def _around(graph: Graph, names: Iterable[str], steps: int = NEAR) -> set[str]:
    """The nodes within a few edges of the named nodes."""
    nearby = set(names) & set(graph.named)
    latest = nearby
    for _ in range(steps):
        if len(nearby) > MOST_NEAR:
            break
        sources = {ref.name for name in latest for ref in graph.named[name].inputs()} & set(graph.named)
        latest = (sources | {node.name for name in latest for node in graph.readers(name)}) - nearby
        nearby = nearby | latest
    return nearby


def _rewritten(graph: Graph, schedule: Schedule, rewrite: Rewrite, device: DeviceModel) -> Schedule:
    """The schedule with one more rewrite; kernels lose removed nodes and include their replacements.

    ``device`` is the GPU for whose sizes kernels of another kind than before are configured.
    """
    before = ir_for(graph, schedule)
    try:
        edit = algebra_edit(before.graph, rewrite)
    except CannotRewrite as reason:
        raise IllegalAction(str(reason)) from None
    rewrites = (*schedule.rewrites, rewrite)
    after = ir_for(graph, Schedule(rewrites=rewrites))
    alive = {node.name: node for node in after.graph.nodes}
    kernels = [_rewritten_kernel(before, after, plan, edit, alive, device) for plan in schedule.kernels]
    return replace(schedule, kernels=tuple(plan for plan in kernels if plan is not None), rewrites=rewrites)


def _rewritten_kernel(
    before: KernelIR, after: KernelIR, plan: KernelPlan, edit: Edit, alive: Mapping[str, Node], device: DeviceModel
) -> KernelPlan | None:
    """A kernel on the rewritten graph; None if none of its nodes remain."""
    if edit.node not in plan.nodes and set(plan.nodes) | set(plan.recomputed) <= set(alive):
        region_of(after, plan)
        return plan
    remaining = tuple(name for name in plan.nodes if name in alive)
    again = tuple(name for name in plan.recomputed if name in alive)
    added = tuple(node.name for node in edit.added if node.name in alive)
    choices = [remaining]
    if edit.node in plan.nodes:
        choices.insert(0, (*remaining, *added))
    elif edit.node in plan.recomputed:
        again = (*again, *added)
    kind = region_of(before, plan).kind
    for nodes in choices:
        if not nodes:
            return None
        try:
            region = region_at(after, nodes, again)
        except IllegalAction:
            continue
        # Another kind of kernel has other choices, so it starts from its first configuration.
        config = plan.config if region.kind is kind else default_config(after, region, device)
        return KernelPlan(region.nodes, config, again)
    raise IllegalAction("the rewrite would change a kernel into operations that cannot be one kernel")
