"""Which values are known, or tried, to have no negative element: sums of their products cancel nothing."""

from __future__ import annotations

from collections.abc import Collection

from mtmc_lsp.core.dtypes import is_float
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.macro.prims import VIEW_OPS, Prim, PrimOp, Program

ALWAYS = frozenset("exp exp2 sigmoid hardsigmoid abs sqrt rsqrt square relu relu6 cosh".split())
"""Functions with no negative value, whatever they are of."""
KEEPING = frozenset("add mul div cast rounded minimum fmin where reciprocal log1p expm1 tanh".split())
"""Functions with no negative value of operands that have none."""
MOVING = VIEW_OPS | {PrimOp.CAT, PrimOp.CROP, PrimOp.GATHER, PrimOp.FOLD, PrimOp.MATMUL, PrimOp.SCAN}
"""Primitives with no negative element where no operand has one: they move, add or multiply."""


def nonnegative_inputs(capture: Capture) -> frozenset[str]:
    """The graph inputs whose values have no negative element, as the workload asks for them or capture saw them.

    Also those of floats that no range is asked for: verification tries them as numbers from 0 to 1.
    """
    asked = {spec.name: spec.tensor.low for spec in capture.workload.arguments if spec.tensor is not None}
    floats = {item.name for item in capture.graph.inputs if is_float(item.type.dtype)}
    ranges = ((item.input, asked.get(item.name, item.low)) for item in capture.arguments)
    return frozenset(name for name, low in ranges if name is not None and (name in floats if low is None else low >= 0))


def is_nonnegative(program: Program, name: str, inputs: Collection[str]) -> bool:
    """Whether no element of a primitive's value is negative (NaN counts as none).

    Args:
        program: what it is a part of.
        name: the primitive.
        inputs: graph inputs that are known to have no negative element.
    """
    known = {program.values[item, 0] for item in inputs if (item, 0) in program.values}
    found: dict[str, bool] = {}
    pending = [name]
    while pending:
        prim = program.prims[pending[-1]]
        waiting = [] if prim.name in known else [each for each in _asked(prim) if each not in found]
        if waiting:
            pending += waiting
            continue
        found[pending.pop()] = prim.name in known or _follows(prim, found)
    return found[name]


def _asked(prim: Prim) -> tuple[str, ...]:
    """The operands whose signs decide."""
    if prim.fn in ALWAYS or prim.op in (PrimOp.INPUT, PrimOp.OPAQUE, PrimOp.RANDOM, PrimOp.CONSTANT, PrimOp.IOTA):
        return ()
    return prim.inputs[1:] if prim.fn == "where" else prim.inputs


def _follows(prim: Prim, found: dict[str, bool]) -> bool:
    signs = [found[name] for name in _asked(prim)]
    if prim.op is PrimOp.CONSTANT:
        value = prim.attrs["value"]
        return isinstance(value, (int, float)) and value >= 0
    if prim.op is PrimOp.POINTWISE:
        if prim.fn in ("maximum", "fmax"):
            return any(signs)
        return prim.fn in ALWAYS or (prim.fn in KEEPING and all(signs))
    if prim.op is PrimOp.REDUCE:
        return prim.fn == "sum_exp" or (prim.fn in ("sum", "mean", "max", "min", "prod") and all(signs))
    if prim.op is PrimOp.PAD:
        outside = prim.attrs["value"]
        return isinstance(outside, (int, float)) and outside >= 0 and all(signs)
    return prim.op is PrimOp.RANDOM or (prim.op in MOVING and all(signs))
