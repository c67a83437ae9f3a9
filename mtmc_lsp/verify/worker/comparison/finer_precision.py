"""References of 16-bit tensors that compute in float32, which a candidate must do as well. Runs in workers.

Rounding the inputs of a layer norm to bfloat16 moves its result far if the mean is far above the spread. That excuses code whose
intermediate values have 16 bits, such as a mean that is rounded before it is subtracted. ``F.layer_norm`` has none: it converts
its input, computes in float32 and rounds the result once. Then its error is far below what rounding of the inputs does.
"""

from __future__ import annotations

import torch

from mtmc_lsp.core.dtypes import EPSILON
from mtmc_lsp.verify.error_limits import FACTORS

SIXTEEN_BITS = ("float16", "bfloat16")
LEAST_ELEMENTS, LEAST_ROWS = 1024, 8
"""With fewer elements, or with fewer rows that may share one rounding error, the reference's error may be small by chance."""


def finer_share(value: torch.Tensor, error: float, moved: float) -> float:
    """The part of ``moved`` that counts: 1, or that of float32 where the reference evidently computes in float32.

    Args:
        value: a result of the reference.
        error: relative L2 error of that result.
        moved: relative L2 distance by which rounding of the inputs to the dtype of ``value`` moves the result.
    """
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype not in SIXTEEN_BITS or value.dim() < 2 or value.numel() < LEAST_ELEMENTS:
        return 1.0
    rows = value.numel() // max(value.shape[-1], 1)
    if rows < LEAST_ROWS or FACTORS["budget"] * error > moved:
        return 1.0
    return EPSILON["float32"] / EPSILON[dtype]
