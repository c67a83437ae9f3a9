"""Divisions that decide a whole number, as ``round(x / scale)`` of a quantiser: they are rounded as PyTorch's own kernels round.

Where operands are such that a quotient lies on an edge, as 7.5 for a range that is symmetric, the last bit decides, for all
elements that share the scale. Triton's ``/`` is within 2 units in the last place; PyTorch divides exactly rounded, and by a
Python number multiplies by its reciprocal (``aten/src/ATen/native/cuda/BinaryDivTrueKernel.cu``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mtmc_lsp.core.dtypes import compute_dtype, is_float, round_to_float32
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.ir.primitives import Prim, PrimOp

WHOLE = frozenset({"round", "floor", "ceil", "trunc"})
"""Functions that give whole numbers."""
PASSING = frozenset(
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
"""Primitives of which each element follows from elements of their operands without a sum."""


def with_exact_divisions(prims: Mapping[str, Prim]) -> dict[str, Prim]:
    """Primitives in execution order, with ``div_rn`` and ``times_reciprocal`` in the place of ``div`` where it decides."""
    deciding: set[str] = set()
    for name in reversed(list(prims)):
        prim = prims[name]
        if _is_whole(prim, prims) or (name in deciding and prim.op in PASSING):
            deciding.update(prim.inputs)
    return {name: _exact(prim, prims) if name in deciding else prim for name, prim in prims.items()}


def _is_whole(prim: Prim, prims: Mapping[str, Prim]) -> bool:
    if prim.op is not PrimOp.POINTWISE or not is_float(prims[prim.inputs[0]].dtype):
        return False
    is_cast_to_integers = prim.fn == "cast" and not is_float(prim.dtype) and prim.dtype != "bool"
    return prim.fn in WHOLE or is_cast_to_integers


def _exact(prim: Prim, prims: Mapping[str, Prim]) -> Prim:
    if (
        prim.op is not PrimOp.POINTWISE
        or prim.fn not in ("div", "reciprocal")
        or compute_dtype(prim.dtype) != "float32"
    ):
        return prim
    operands = [prims[name] for name in prim.inputs]
    numbers = [own.attrs["value"] if own.op is PrimOp.CONSTANT else None for own in operands]
    # Sizes, and integers that the kernel makes floats of, are divided as before.
    if not all(is_float(own.dtype) for own in operands) or any(isinstance(number, Size) for number in numbers):
        return prim
    number = numbers[-1]
    if prim.fn == "div" and isinstance(number, (int, float)) and round_to_float32(number) != 0:
        reciprocal = round_to_float32(1.0 / number)
        return replace(prim, attrs={**prim.attrs, "fn": "times_reciprocal", "reciprocal": reciprocal})
    return replace(prim, attrs={**prim.attrs, "fn": "div_rn" if prim.fn == "div" else "reciprocal_rn"})
