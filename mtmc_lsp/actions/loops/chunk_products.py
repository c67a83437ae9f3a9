"""Chunk products: the iterations of a chunk are products of matrices, for loops whose state is a sum of outer products.

*Legal* where each state is updated by ``S = gate * S + key outer value`` in float32, and the body reads it by ``sum(query * S)``
over the key, before or after the update (:mod:`mtmc_lsp.ir.loops.chunks`): linear attention, retention, gated linear attention,
state space duality, WKV of RWKV-6. The gate is one number for each head, head and step, or channel of the key. Gate, key and
query depend on no state. The value may contain a read of the state before the update, as in the delta rule: the values of a chunk
then solve a triangular system, by forward substitution. The rewrite is exact over the reals; in floating point it is a
reassociation.

Decays are differences of cumulative logarithms in float64. So gates near zero and one and long sequences stay precise, and a
scalar gate of exactly zero resets the state. The sequential kernel computes again all rows with values that are not finite, with
negative gates, or with gates per channel that decay by more than ``exp(120)`` within a chunk.
"""

from __future__ import annotations

from collections.abc import Iterable

from mtmc_lsp.actions.base import Situation, changed_plan, expected, ir_for, lines_of, lone_kernel_of
from mtmc_lsp.actions.titles import kernel_title
from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.ir.loops.chunks import chunks_or_none
from mtmc_lsp.ir.loops.fusion import loop_in
from mtmc_lsp.ir.regions import Region
from mtmc_lsp.schedule.configs import LoopConfig
from mtmc_lsp.schedule.loop_configs import chunk_config, chunk_tiles
from mtmc_lsp.schedule.schedule import KernelPlan, Schedule
from mtmc_lsp.tuning.kernel_cost import kernel_cost

LEAST_GAIN = 0.2
"""Share of the kernel's time that chunks must be predicted to save: their latencies are estimates."""
CHOICES = ("rows", "block", "warps", "stages", "chunk")


class ChunkProducts:
    """Computes chunks of time steps by matrix products where the state is a sum of outer products."""

    kind = ActionKind.CHUNK_PRODUCTS

    def apply(self, graph: Graph, schedule: Schedule, action: MacroAction) -> Schedule:
        """The loop's kernel with that many iterations in a chunk (1: one after another)."""
        plan = lone_kernel_of(schedule, action)
        return schedule.with_kernel(changed_plan(ir_for(graph, schedule), plan, action, CHOICES))

    def propose(self, situation: Situation) -> Iterable[MacroAction]:
        """Loops whose chunks are predicted to take less time than their iterations one after another."""
        for plan, region in situation.lone_kernels():
            config = plan.config
            if isinstance(config, LoopConfig) and not config.is_scan and not config.is_chunked:
                yield from self._for(situation, plan, region, config)

    def _for(
        self, situation: Situation, plan: KernelPlan, region: Region, present: LoopConfig
    ) -> Iterable[MacroAction]:
        ir, device = situation.ir, situation.device
        form = loop_in(ir, region)
        chunk = chunks_or_none(form)
        if chunk is None:
            return
        configs = list(chunk_tiles(form, chunk_config(device)))
        if not configs:
            # The key has too many channels for a program.
            return
        before = kernel_cost(ir, region, present, device)
        costs = [kernel_cost(ir, region, config, device) for config in configs]
        after = min(costs, key=lambda cost: cost.us)
        config = configs[costs.index(after)]
        if before.us - after.us < LEAST_GAIN * before.us:
            return
        count = form.loop.count.value(ir.graph.sizes)
        states = ", ".join(item.state.name for item in chunk.memories)
        yield MacroAction(
            kind=self.kind,
            region=region.nodes,
            lines=lines_of(ir, region.nodes),
            params={"config": {name: getattr(config, name) for name in CHOICES}},
            rationale=(
                f"{count} iterations add outer products to {states} one after another. The reads of {config.chunk} iterations "
                f"are products of matrices, so {states} changes {-(-count // config.chunk)} times instead of {count}."
            ),
            expected=expected(before, after),
            text=f"Compute chunks of {kernel_title(ir, plan.nodes)} by matrix products",
        )
