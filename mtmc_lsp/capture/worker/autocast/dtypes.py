"""The dtypes of results under autocast, by the names of torch's functions in Python."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from mtmc_lsp.capture.worker.autocast.gpu_rules import FLOAT32, FLOAT32_RESULT, LOWER_PRECISION, NORMS


def _names(operators: Iterable[str], *others: str) -> frozenset[str]:
    return frozenset({operator.partition(".")[0] for operator in operators} | {*others})


IN_AUTOCASTS_DTYPE = _names(LOWER_PRECISION, "__matmul__", "__rmatmul__", "bilinear")
IN_FLOAT32 = _names(
    FLOAT32 | FLOAT32_RESULT | NORMS.keys(), *"__pow__ __rpow__ vector_norm cross_entropy interpolate normalize".split()
)
"""Functions with float32 results, those of ``torch.nn.functional`` that run such operators included."""


def result_dtype(name: str, device: str) -> torch.dtype | None:
    """The dtype that autocast gives a function's result; ``None`` if it does not decide it.

    Args:
        name: of the function in Python.
        device: type of the device that holds the tensors.
    """
    if not torch.is_autocast_enabled(device):
        return None
    if name in IN_AUTOCASTS_DTYPE:
        dtype: torch.dtype = torch.get_autocast_dtype(device)
        return dtype
    return torch.float32 if name in IN_FLOAT32 else None
