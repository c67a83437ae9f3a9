"""Split: several programs share one long sum, and their parts are combined by a second kernel.

*Legal* for reductions (parts of each row's columns) and for products (parts of K) in a power of two of parts, none of them
empty. Sum, product, minimum, maximum, logical and/or, arg-reductions and the online softmax pair (maximum, sum of
exponentials below it) are associative and commutative over the reals, so parts may be combined in any order; for floating
point it is a reassociation, always in the same order, without atomics.
"""

from __future__ import annotations

from collections.abc import Iterable

from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.macro.actions.base import (
    IllegalAction,
    Situation,
    config_of,
    current_config,
    expected,
    kernel_of,
    kind_word,
    program_for,
    region_of,
    where,
    whole_numbers,
)
from mtmc_lsp.macro.configs import split_parts, split_product_parts
from mtmc_lsp.macro.cost import kernel_cost, programs_of
from mtmc_lsp.macro.prims import Program
from mtmc_lsp.macro.regions import Region, RegionKind
from mtmc_lsp.macro.schedule import KernelPlan, Schedule

KEYS = {RegionKind.REDUCE: ("split", "block"), RegionKind.MATMUL: ("split_k", "block_k")}
"""The configuration's name for the number of parts, and for what a program takes at a time."""


class Split:
    """Two passes over few long rows, or split-K."""

    kind = ActionKind.SPLIT

    def apply(self, graph: Graph, schedule: Schedule, action: MacroAction) -> Schedule:
        """The kernel in that many parts; in 1 part it is whole again."""
        plan = kernel_of(schedule, action)
        program = program_for(graph, schedule)
        region = region_of(program, plan)
        changes = config_of(action)
        if region.kind not in KEYS or set(changes) - {KEYS[region.kind][0], "block", "warps", "persist"}:
            raise IllegalAction(f"split: a {kind_word(region.kind)} kernel has no such parts")
        if schedule.shares_launch(plan):
            raise IllegalAction("split: the launch runs other kernels too")
        name, block = KEYS[region.kind]
        whole_numbers(action, {key: changes[key] for key in (name, "block", "warps") if key in changes})
        config = {**current_config(program, region, plan), **changes}
        most = region.columns.value(program.graph.sizes)
        if int(config[name]) > max(1, -(-most // int(config[block]))):
            raise IllegalAction(f"split: {config[name]} parts of {most} would leave some empty")
        return schedule.with_kernel(KernelPlan(plan.nodes, config, plan.recomputed))

    def propose(self, situation: Situation) -> Iterable[MacroAction]:
        """Where one program per row (or tile) leaves most of the device idle."""
        program = situation.program
        for plan, region in situation.kernels():
            if region.kind in KEYS and not situation.schedule.shares_launch(plan):
                yield from self._for(situation, program, plan, region)

    def _for(self, situation: Situation, program: Program, plan: KernelPlan, region: Region) -> Iterable[MacroAction]:
        name, _ = KEYS[region.kind]
        config = current_config(program, region, plan)
        if int(config.get(name, 1)) > 1:
            return
        if region.kind is RegionKind.REDUCE:
            changes = split_parts(program, region, config)
        else:
            changes = split_product_parts(program, region, config)
        if not changes:
            return
        device = situation.device
        before = kernel_cost(program, region, config, device)
        after = kernel_cost(program, region, {**config, **changes}, device)
        if before.us - after.us <= 0:
            return
        lines, place = where(program, region.nodes)
        busy = programs_of(program, region, config)
        what = "rows" if region.kind is RegionKind.REDUCE else "tiles"
        yield MacroAction(
            kind=self.kind,
            region=region.nodes,
            lines=lines,
            params={"config": changes},
            rationale=(
                f"{busy} programs cannot keep {device.sm_count} multiprocessors busy: "
                f"{changes[name]} programs share the long sums of each of its {what}, and a second kernel combines them."
            ),
            expected=expected(before, after),
            text=f"split the {kind_word(region.kind)} kernel of {place} into {changes[name]} parts",
        )
