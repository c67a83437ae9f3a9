"""Library: run a product in cuDNN or cuBLAS again where these are faster, and fuse the operations around it.

*Legal* always: the user's operation runs on its original operands. Rewrites of the product are undone, and kernels that contain
removed nodes are dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from mtmc_lsp.actions.algebra import nodes_of, with_kernels
from mtmc_lsp.actions.base import IllegalAction, Situation, ir_for, lines_of, region_of
from mtmc_lsp.actions.titles import operation_names
from mtmc_lsp.core.action import ActionKind, Expected, MacroAction
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.core.json_codec import to_json
from mtmc_lsp.core.run import StepStatus
from mtmc_lsp.ir.primitives import KernelIR
from mtmc_lsp.schedule.schedule import KernelPlan, Schedule
from mtmc_lsp.tuning.cost import matmul_flops

COMPILER = "compile"
"""The baseline (torch.compile) that calls the library and fuses the operations around it."""
AHEAD = 0.97
"""The baseline's time relative to this version's, below which the library is tried again."""


class Library:
    """Runs products as library calls among kernels."""

    kind = ActionKind.LIBRARY

    def apply(self, graph: Graph, schedule: Schedule, action: MacroAction) -> Schedule:
        """The products of ``params["nodes"]`` as torch calls, and the kernels of ``params["kernels"]``."""
        names = nodes_of(action)
        if not set(names) & set(_products(ir_for(graph, Schedule()))):
            raise IllegalAction(f"library: no product is called {', '.join(names)}")
        changed = _without_products(graph, schedule, names)
        return with_kernels(ir_for(graph, changed), changed, action)

    def propose(self, situation: Situation) -> Iterable[MacroAction]:
        """Where ``torch.compile`` is faster than a version with kernels for products."""
        timing = situation.timing
        ratio = timing.against(COMPILER) if timing is not None else None
        if timing is None or ratio is None or ratio.ratio >= AHEAD:
            return
        ir_before = ir_for(situation.graph, Schedule())
        tried = {node for s in situation.history if s.action.kind is self.kind for node in nodes_of(s.action)}
        for step in reversed(situation.history):
            names = [name for name in step.action.region if name in set(_products(ir_before))]
            if step.status is not StepStatus.ACCEPTED or not names or set(names) <= tried:
                continue
            action = self._without(situation, ir_before, names, timing.median_us * (1.0 - ratio.ratio))
            if action is not None:
                yield action
            return

    def _without(
        self, situation: Situation, ir_before: KernelIR, names: list[str], saved_us: float
    ) -> MacroAction | None:
        """The action, where other operations remain to fuse."""
        try:
            base = _without_products(situation.graph, situation.schedule, names)
            ir = ir_for(situation.graph, base)
        except IllegalAction:
            return None
        without_products = replace(ir, opaque=ir.opaque | set(names))
        fusions = situation.search_in(without_products, base).best()
        if not fusions and not base.kernels:
            return None
        what = operation_names(ir_before, names)
        return MacroAction(
            kind=self.kind,
            region=tuple(names),
            lines=lines_of(ir_before, names),
            params={
                "nodes": names,
                "kernels": [
                    {"nodes": list(fusion.region.nodes), "config": to_json(fusion.config)} for fusion in fusions
                ],
            },
            rationale=f"torch.compile, which calls the library for {what}, is faster than the present kernels. So "
            f"the library runs {what} again, and the operations around it are fused separately.",
            expected=Expected(saved_us),
            text=f"Leave {what} to the library, and fuse the operations around it",
        )


def _products(ir: KernelIR) -> list[str]:
    return [node.name for node in ir.graph.nodes if matmul_flops(ir, node.name)]


def _without_products(graph: Graph, schedule: Schedule, names: Collection[str]) -> Schedule:
    """The schedule without rewrites of these nodes, and without kernels that contain them or removed nodes."""
    rewrites = tuple(r for r in schedule.rewrites if not _is_about(r.node, names))
    base = replace(schedule, kernels=(), rewrites=rewrites)
    ir = ir_for(graph, base)
    alive = {node.name for node in ir.graph.nodes}
    remaining: list[KernelPlan] = []
    for plan in schedule.kernels:
        held = {*plan.nodes, *plan.recomputed}
        if not held <= alive or held & set(names):
            continue
        try:
            region_of(ir, plan)
        except IllegalAction:
            continue
        remaining.append(plan)
    return replace(base, kernels=tuple(remaining))


def _is_about(node: str, names: Collection[str]) -> bool:
    """Whether a rewrite concerns one of the nodes, or a node that another rewrite created from it."""
    return any(node == name or node.startswith(f"{name}_packed") for name in names)
