"""What all kernels with reductions need to know of a reduction."""

from __future__ import annotations

import math

from mtmc_lsp.codegen.kernel.snippets import literal
from mtmc_lsp.core.dtypes import integer_range, is_float
from mtmc_lsp.ir.primitives import KernelIR, Prim
from mtmc_lsp.ir.regions import Region


def neutral(prim: Prim, ir: KernelIR) -> str:
    """The element that does not change the result of a reduction or scan, as a literal."""
    if prim.fn in ("sum", "sum_exp", "any"):
        return "0.0" if is_float(prim.dtype) else "0"
    if prim.fn in ("prod", "all"):
        return "1.0" if is_float(prim.dtype) else "1"
    source = ir.prims[prim.inputs[0]].dtype
    low, high = (-math.inf, math.inf) if is_float(source) else integer_range(source)
    return literal(low if prim.fn in ("max", "argmax") else high)


def only_for_softmax(prim: Prim, region: Region, ir: KernelIR) -> bool:
    """Whether a maximum is only subtracted in exponentials. Then it may ignore NaN, which propagates through the sum."""
    readers = [reader.fn for name in region.prims if prim.name in (reader := ir.prims[name]).inputs]
    return "sum_exp" in readers and "isinf" not in readers
