"""Group norms and their gradients as row reductions. Runs in workers.

PyTorch's decompositions depend on the device: for a CPU, they compute a scale and a shift for each channel by strided
views, which do not fuse, and their gradients divide by numbers of elements, which fixes the sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mtmc_lsp.capture.worker.passes.decompositions import wide


def group_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    batch: Any,
    channels: Any,
    inner: Any,
    groups: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The result, and the mean and the inverse deviation of each group in the dtype of the computation."""
    grouped = wide(x).reshape([batch, groups, channels // groups * inner])
    mean = grouped.mean(-1, keepdim=True)
    centred = grouped - mean
    inverse = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    value = (centred * inverse).reshape(x.shape)
    if weight is not None:
        value = value * _per_channel(weight, x)
    if bias is not None:
        value = value + _per_channel(bias, x)
    return value.to(x.dtype), mean.squeeze(-1), inverse.squeeze(-1)


def group_norm_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    inverse: torch.Tensor,
    weight: torch.Tensor | None,
    batch: Any,
    channels: Any,
    inner: Any,
    groups: int,
    needed: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """The gradients of ``x``, the weight and the bias that are needed, as those of a layer norm of each group."""
    by_group = [batch, groups, channels // groups * inner]
    upstream = wide(gradient)
    normal = (wide(x).reshape(by_group) - mean.unsqueeze(-1)) * inverse.unsqueeze(-1)
    of_x = of_weight = of_bias = None
    if needed[0]:
        weighted = upstream if weight is None else upstream * _per_channel(weight, x)
        weighted = weighted.reshape(by_group)
        along = (weighted * normal).mean(-1, keepdim=True)
        of_x = (weighted - weighted.mean(-1, keepdim=True) - normal * along) * inverse.unsqueeze(-1)
        of_x = of_x.reshape(x.shape).to(x.dtype)
    others = [i for i in range(x.dim()) if i != 1]
    if needed[1]:
        of_weight = (upstream * normal.reshape(x.shape)).sum(others).to(x.dtype if weight is None else weight.dtype)
    if needed[2]:
        of_bias = upstream.sum(others).to(x.dtype if weight is None else weight.dtype)
    return of_x, of_weight, of_bias


def _per_channel(value: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return wide(value).reshape([-1 if i == 1 else 1 for i in range(x.dim())])
