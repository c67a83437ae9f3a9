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

from mtmc_lsp.actions.loops.sequential_loops import SequentialLoopAction
from mtmc_lsp.core.action import ActionKind
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.ir.loops.chunks import chunk_form
from mtmc_lsp.ir.loops.form import LoopForm
from mtmc_lsp.schedule.configs import LoopConfig


class ChunkProducts(SequentialLoopAction):
    """Computes chunks of time steps by matrix products where the state is a sum of outer products."""

    kind = ActionKind.CHUNK_PRODUCTS
    choices = ("rows", "block", "warps", "stages", "chunk")

    def title(self, name: str) -> str:
        """``Compute chunks of the loop by matrix products``."""
        return f"Compute chunks of {name} by matrix products"

    def reason(self, form: LoopForm, config: LoopConfig, device: DeviceModel) -> str:
        """Why products pay for a loop."""
        count = form.loop.count.value(form.ir.graph.sizes)
        states = ", ".join(item.state.name for item in chunk_form(form).memories)
        return (
            f"{count} iterations add outer products to {states} one after another. The reads of {config.chunk} iterations "
            f"are products of matrices, so {states} changes {-(-count // config.chunk)} times instead of {count}."
        )
