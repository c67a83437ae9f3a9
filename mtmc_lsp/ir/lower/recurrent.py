"""Lowers recurrent layers, and loops over time steps, to one primitive per result; the kernel runs their steps."""

from __future__ import annotations

from mtmc_lsp.core.graph import RECURRENT_GATES, Ref
from mtmc_lsp.core.loop import LOOP
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.ir.loops.form import loop_form
from mtmc_lsp.ir.lower import Call, lowering
from mtmc_lsp.ir.primitives import PrimOp
from mtmc_lsp.ir.recurrence import Recurrence
from mtmc_lsp.ir.regions import CannotFuse

DTYPES = frozenset({"float16", "bfloat16", "float32", "float64"})


@lowering(*RECURRENT_GATES)
def recurrent(call: Call) -> tuple[str, ...]:
    """``(input, states, weights, has_biases, layers, dropout, train, bidirectional, batch_first)``; dropout is rejected."""
    if call.overload != "input" or len(call.node.args) != 9:
        raise call.fail("a packed sequence")
    states, weights = call.raw(1), call.raw(2)
    state_tensors = states if isinstance(states, tuple) else (states,)
    if not isinstance(weights, tuple):
        raise call.fail("weights are missing")
    tensors = [item for item in (call.raw(0), *state_tensors, *weights) if isinstance(item, Ref)]
    if len(tensors) != 1 + len(state_tensors) + len(weights):
        raise call.fail("an argument is not a tensor")
    if call.flag(6, "train") and call.number(5, "dropout", 0.0):
        raise call.fail("dropout between layers draws random numbers")
    inputs = [call.b.values[ref.name, ref.index] for ref in tensors]
    dtypes = {call.b.dtype(name) for name in inputs}
    if len(dtypes) > 1 or not dtypes < DTYPES:
        raise call.fail("mixed dtypes, or a dtype without matrix products")
    if len(call.b.shape(inputs[0])) != 3:
        raise call.fail("a sequence without a batch")
    hidden = call.node.outputs[1].shape[-1]
    form = Recurrence(
        cell=call.op,
        layers=call.integer(4, "num_layers"),
        directions=2 if call.flag(7, "bidirectional") else 1,
        hidden=hidden.constant if hidden.is_constant else 0,
        has_biases=call.flag(3, "has_biases"),
        batch_first=call.flag(8, "batch_first"),
    )
    layer_count = form.layers * form.directions
    shapes = [call.b.shape(name) for name in inputs[1 + len(state_tensors) :]]
    rows = Size.of(form.gates * form.hidden)
    per_layer = 4 if form.has_biases else 2
    if not form.hidden or len(shapes) != per_layer * layer_count or any(shape[0] != rows for shape in shapes):
        raise call.fail("weights whose sizes do not match the layers")
    return tuple(
        call.b.add(PrimOp.RECURRENT, inputs, kind.shape, kind.dtype, index=i, form=form)
        for i, kind in enumerate(call.node.outputs)
    )


@lowering(LOOP)
def loop(call: Call) -> tuple[str, ...]:
    """The body, which is lowered by itself, must be one elementwise region, or one with reductions along the same axes."""
    results = tuple(Ref(call.node.name, i) for i in range(len(call.node.outputs)))
    try:
        loop_form(call.node, call.b.graph, results)
    except CannotFuse as reason:
        raise call.fail(str(reason)) from None
    inputs = [call.b.values[ref.name, ref.index] for ref in call.node.args if isinstance(ref, Ref)]
    return tuple(
        call.b.add(PrimOp.LOOP, inputs, kind.shape, kind.dtype, index=i) for i, kind in enumerate(call.node.outputs)
    )
