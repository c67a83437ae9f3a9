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

from mtmc_lsp.actions.base import Situation, expected, lines_of
from mtmc_lsp.actions.loops.sequential_loops import LEAST_GAIN, SequentialLoopAction
from mtmc_lsp.actions.titles import kernel_title
from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.ir.loops.chunks import chunks_or_none
from mtmc_lsp.ir.loops.fusion import loop_in
from mtmc_lsp.ir.regions import Region
from mtmc_lsp.schedule.configs import LoopConfig
from mtmc_lsp.schedule.loop_configs import chunk_config, chunk_tiles
from mtmc_lsp.schedule.schedule import KernelPlan
from mtmc_lsp.tuning.kernel_cost import kernel_cost


class ChunkProducts(SequentialLoopAction):
    """Computes chunks of time steps by matrix products where the state is a sum of outer products."""

    kind = ActionKind.CHUNK_PRODUCTS
    choices = ("rows", "block", "warps", "stages", "chunk")

    def proposals(
        self, situation: Situation, plan: KernelPlan, region: Region, present: LoopConfig
    ) -> Iterable[MacroAction]:
        """The action, if it is predicted to pay."""
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
            params={"config": {name: getattr(config, name) for name in self.choices}},
            rationale=(
                f"{count} iterations add outer products to {states} one after another. The reads of {config.chunk} iterations "
                f"are products of matrices, so {states} changes {-(-count // config.chunk)} times instead of {count}."
            ),
            expected=expected(before, after),
            text=f"Compute chunks of {kernel_title(ir, plan.nodes)} by matrix products",
        )
