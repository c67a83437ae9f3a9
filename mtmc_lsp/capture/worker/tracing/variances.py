"""Writes variances as sums of squares in traces with gradients. Runs in workers.

The gradient of torch's ``var`` multiplies by ``2 / (N - correction)``, a quotient of numbers that fixes the sizes. A tensor may
be divided by a size that varies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from mtmc_lsp.capture.worker.passes.decompositions import wide

VARIANCES = (torch.var, torch.Tensor.var)
DEVIATIONS = (torch.std, torch.Tensor.std)
WITH_MEAN = (torch.var_mean, torch.std_mean)


def variance(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``var``, ``std``, ``var_mean`` and ``std_mean`` as means, sums, divisions and roots; else ``NotImplemented``."""
    if function not in (*VARIANCES, *DEVIATIONS, *WITH_MEAN):
        return NotImplemented
    try:
        x, dims, correction, keepdim = _arguments(*args, **kwargs)
    except TypeError:
        # An older form of the call.
        return NotImplemented
    if not x.dim() or not x.is_floating_point() or correction not in (0, 1):
        return NotImplemented
    exact = wide(x)
    mean = exact.mean(dims, keepdim=True)
    result = (exact - mean).square().sum(dims, keepdim=keepdim) / (prod(x.shape[d] for d in dims) - correction)
    if function in (*DEVIATIONS, torch.std_mean):
        result = _root(result)
    if function not in WITH_MEAN:
        return result.to(x.dtype)
    return result.to(x.dtype), (mean if keepdim else exact.mean(dims)).to(x.dtype)


def _arguments(
    x: torch.Tensor,
    dim: Any = None,
    unbiased: bool | None = None,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> tuple[torch.Tensor, list[int], float, bool]:
    """The tensor, the dimensions, the correction, and whether they are kept.

    Raises:
        TypeError: the call has other arguments.
    """
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    if unbiased is not None:
        correction = int(unbiased)
    given = range(x.dim()) if dim is None or dim == () else [dim] if isinstance(dim, int) else list(dim)
    return x, [d % max(x.dim(), 1) for d in given], 1 if correction is None else correction, keepdim


def _root(variance: torch.Tensor) -> torch.Tensor:
    """The square root, whose gradient at 0 is 0 as that of ``std``."""
    is_zero = variance == 0
    return torch.where(is_zero, variance, torch.where(is_zero, torch.ones_like(variance), variance).sqrt())
