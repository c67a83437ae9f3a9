"""Says in words in which precision the products of a new kernel run; a step shows it with its reason."""

from __future__ import annotations

from collections.abc import Mapping

from mtmc_lsp.ir.primitives import KernelIR, PrimOp
from mtmc_lsp.ir.regions import Region
from mtmc_lsp.schedule.configs import KernelConfig, PrecisionMode, precision_of

SPLIT = "float32 from three float16 products"
FLOAT32: Mapping[PrecisionMode, str] = {
    PrecisionMode.IEEE: "float32",
    PrecisionMode.TF32: "TF32, as your program allows",
    PrecisionMode.FP16_SCALED: "scaled float16 operands with TF32's significand, sums in float32",
    PrecisionMode.TF32X3: "float32 from three TF32 products",
    PrecisionMode.FP16X3: SPLIT,
    PrecisionMode.FP16X3_SHORT: SPLIT,
    PrecisionMode.FP16X3_PROMOTED: SPLIT,
}
"""How each mode multiplies float32 operands."""


def precision_text(ir: KernelIR, region: Region, config: KernelConfig) -> str:
    """A sentence about the products of a kernel; empty for a kernel without products."""
    products = [ir.prims[name] for name in region.prims if ir.prims[name].op in (PrimOp.MATMUL, PrimOp.RECURRENT)]
    dtypes = dict.fromkeys(ir.prims[each.inputs[0]].dtype for each in products)
    words = dict.fromkeys(_words(dtype, precision_of(config)) for dtype in dtypes)
    if not words:
        return ""
    return f" Precision of its product{'s' if len(products) > 1 else ''}: {'; '.join(words)}."


def _words(dtype: str, mode: PrecisionMode | None) -> str:
    if dtype in ("float16", "bfloat16"):
        return f"{dtype} operands, sums in float32"
    # An attention of float32 tensors has no choice of a mode.
    return FLOAT32.get(mode or PrecisionMode.IEEE, "float32") if dtype == "float32" else dtype
