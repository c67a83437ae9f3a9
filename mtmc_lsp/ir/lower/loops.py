"""Lowers a loop over time steps to one primitive per result; the kernel runs its body, which is lowered by itself."""

from __future__ import annotations

from mtmc_lsp.core.graph import Ref
from mtmc_lsp.core.loop import LOOP
from mtmc_lsp.ir.loops import POINTWISE, LoopForm
from mtmc_lsp.ir.lower import Call, lower, lowering
from mtmc_lsp.ir.primitives import PrimOp
from mtmc_lsp.ir.regions import CannotFuse, RegionKind, analyse


@lowering(LOOP)
def loop(call: Call) -> tuple[str, ...]:
    """The body must be one elementwise region, or one with reductions along the same axes."""
    value = call.node.loop
    if value is None:
        raise call.fail("a loop without a body")
    ir = lower(value.body(call.b.graph))
    if opaque := sorted(ir.opaque):
        raise call.fail(f"{ir.graph.node(opaque[0]).op} stays a torch call")
    try:
        region = analyse(ir, ir.graph.named)
    except CannotFuse as reason:
        raise call.fail(str(reason)) from None
    if region.kind not in (RegionKind.MAP, RegionKind.REDUCE) or region.parts:
        raise call.fail(f"a body with a {region.kind.value}")
    form = LoopForm(value, ir, region)
    if any(ir.prims[name].op is PrimOp.RANDOM for name in region.prims):
        raise call.fail("it draws random numbers")
    held = {form.prim(item) for item in value.states}
    for name in region.prims:
        prim = ir.prims[name]
        if held & set(prim.inputs):
            if prim.op not in POINTWISE:
                raise call.fail("an iteration reads neighbouring elements of its state")
            held.add(name)
    inputs = [call.b.values[ref.name, ref.index] for ref in call.node.args if isinstance(ref, Ref)]
    return tuple(
        call.b.add(PrimOp.LOOP, inputs, kind.shape, kind.dtype, index=i, form=form)
        for i, kind in enumerate(call.node.outputs)
    )
