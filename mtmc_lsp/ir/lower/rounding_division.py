"""Makes divisions that feed a rounding operation, such as ``round(x / scale)`` in a quantiser, match PyTorch bit for bit.

If quotients are exactly halfway between integers (7.5 for a symmetric range), the last bit decides the result for all elements
that share the scale. Triton's ``/`` has an error of up to 2 ULP. PyTorch rounds divisions correctly, and replaces division by
a Python number with multiplication by its reciprocal (``aten/src/ATen/native/cuda/BinaryDivTrueKernel.cu``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mtmc_lsp.core.dtypes import compute_dtype, is_float, round_to_float32
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.ir.primitives import Prim, PrimOp

ROUNDING_FUNCTIONS = frozenset({"round", "floor", "ceil", "trunc"})
"""Functions that round to integers."""
ELEMENTWISE = frozenset(
    {
        PrimOp.POINTWISE,
        PrimOp.RESHAPE,
        PrimOp.PERMUTE,
        PrimOp.EXPAND,
        PrimOp.ALIAS,
        PrimOp.SLICE,
        PrimOp.FLIP,
        PrimOp.CAT,
    }
)
"""Primitives whose elements depend on single elements of their operands."""


def with_exact_divisions(prims: Mapping[str, Prim]) -> dict[str, Prim]:
    """``prims`` in execution order, with ``div_rn`` or ``times_reciprocal`` for each ``div`` that feeds a rounding."""
    rounded: set[str] = set()
    for name in reversed(list(prims)):
        prim = prims[name]
        if _rounds(prim, prims) or (name in rounded and prim.op in ELEMENTWISE):
            rounded.update(prim.inputs)
    return {name: _exact(prim, prims) if name in rounded else prim for name, prim in prims.items()}


def _rounds(prim: Prim, prims: Mapping[str, Prim]) -> bool:
    if prim.op is not PrimOp.POINTWISE or not is_float(prims[prim.inputs[0]].dtype):
        return False
    is_cast_to_integers = prim.fn == "cast" and not is_float(prim.dtype) and prim.dtype != "bool"
    return prim.fn in ROUNDING_FUNCTIONS or is_cast_to_integers


def _exact(prim: Prim, prims: Mapping[str, Prim]) -> Prim:
    if (
        prim.op is not PrimOp.POINTWISE
        or prim.fn not in ("div", "reciprocal")
        or compute_dtype(prim.dtype) != "float32"
    ):
        return prim
    operands = [prims[name] for name in prim.inputs]
    numbers = [operand.attrs["value"] if operand.op is PrimOp.CONSTANT else None for operand in operands]
    # Divisions by sizes, and of integers that the kernel converts to float, do not change.
    if not all(is_float(operand.dtype) for operand in operands) or any(isinstance(number, Size) for number in numbers):
        return prim
    number = numbers[-1]
    if prim.fn == "div" and isinstance(number, (int, float)) and round_to_float32(number) != 0:
        reciprocal = round_to_float32(1.0 / number)
        return replace(prim, attrs={**prim.attrs, "fn": "times_reciprocal", "reciprocal": reciprocal})
    return replace(prim, attrs={**prim.attrs, "fn": "div_rn" if prim.fn == "div" else "reciprocal_rn"})
