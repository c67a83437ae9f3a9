"""Lowers a loop over time steps to one primitive per result; the kernel runs its body, which is lowered by itself."""

from __future__ import annotations

from mtmc_lsp.core.graph import Ref
from mtmc_lsp.core.loop import LOOP
from mtmc_lsp.ir.loops.form import loop_form
from mtmc_lsp.ir.lower import Call, lowering
from mtmc_lsp.ir.primitives import PrimOp
from mtmc_lsp.ir.regions import CannotFuse


@lowering(LOOP)
def loop(call: Call) -> tuple[str, ...]:
    """The body must be one elementwise region, or one with reductions along the same axes."""
    results = tuple(Ref(call.node.name, i) for i in range(len(call.node.outputs)))
    try:
        loop_form(call.node, call.b.graph, results)
    except CannotFuse as reason:
        raise call.fail(str(reason)) from None
    inputs = [call.b.values[ref.name, ref.index] for ref in call.node.args if isinstance(ref, Ref)]
    return tuple(
        call.b.add(PrimOp.LOOP, inputs, kind.shape, kind.dtype, index=i) for i, kind in enumerate(call.node.outputs)
    )
