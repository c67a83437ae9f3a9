"""Inputs and results of runs: in float64, perturbed, by key. Runs in workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mtmc_lsp.capture.worker.arguments.strided_tensors import laid_out, shares_elements
from mtmc_lsp.core.dtypes import EPSILON
from mtmc_lsp.verify.worker.comparison.batched_reads import computable

ResultKey = int | str
"""The number of a result, or the name of a changed input."""


def tensors_by_key(run: Mapping[str, Any]) -> dict[ResultKey, torch.Tensor]:
    """The tensors that a run returned, and the inputs that it changed."""
    values = {**dict(enumerate(run["results"])), **run["after"]}
    return {key: value for key, value in values.items() if isinstance(value, torch.Tensor)}


def in_float64(tensor: torch.Tensor) -> torch.Tensor:
    """A float64 copy in the same layout; integers and booleans keep their dtype."""
    return laid_out(tensor, tensor.stride(), torch.float64 if tensor.is_floating_point() else None)


def dtype_name(tensor: torch.Tensor) -> str:
    """The dtype without its module: ``float32``."""
    return str(tensor.dtype).removeprefix("torch.")


def finest_epsilon(results: list[Any]) -> float:
    """The smallest machine epsilon of the results, which is about the precision of the reference's computation."""
    dtypes = [str(r.dtype).removeprefix("torch.") for r in results if isinstance(r, torch.Tensor)]
    return min((EPSILON[dtype] for dtype in dtypes if dtype in EPSILON), default=EPSILON["float32"])


def perturbed(inputs: dict[str, torch.Tensor], seed: int, epsilon: float) -> dict[str, torch.Tensor]:
    """The inputs in float64, each element changed by a relative amount of up to ``epsilon / 2``.

    On a GPU subnormal numbers become 0, because its rounding functions flush them (``floor`` and ``ceil`` as PTX's ``.ftz``).
    """
    results = {}
    for number, (name, tensor) in enumerate(inputs.items()):
        if not tensor.is_floating_point():
            results[name] = tensor.clone()
            continue
        generator = torch.Generator(tensor.device).manual_seed(seed + 1 + 1000 * number)
        # In place: memory for further copies of large tensors may be missing.
        changed = torch.empty_like(tensor, dtype=torch.float64).uniform_(generator=generator)
        changed.sub_(0.5).mul_(epsilon).add_(1.0).mul_(computable(tensor))
        if tensor.is_cuda:
            changed.masked_fill_(computable(tensor).abs() < torch.finfo(tensor.dtype).tiny, 0.0)
        # `empty_like` drops gaps between elements, and shared elements: these are changed one by one, as rounding treats them.
        has_same_layout = changed.stride() == tensor.stride() or shares_elements(tensor.shape, tensor.stride())
        results[name] = changed if has_same_layout else laid_out(changed, tensor.stride())
    return results
