"""Operations that the graph shows as the smaller ones they are made of. Runs in workers.

Eager code runs most of these as several kernels anyway; taken apart, each part can join the kernels around it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

BY_TORCH = frozenset(
    "einsum tensordot outer kron dot vdot inner chain_matmul linalg_multi_dot bilinear addr trace "
    "cosine_similarity cosine_embedding_loss triplet_margin_loss hinge_embedding_loss margin_ranking_loss "
    "poisson_nll_loss soft_margin_loss pairwise_distance cdist "
    "broadcast_tensors tile repeat_interleave meshgrid pixel_shuffle pixel_unshuffle channel_shuffle rot90 diff take_along_dim "
    "hstack vstack dstack column_stack fliplr flipud one_hot "
    "nansum count_nonzero std_mean isclose prelu glu logit frac logaddexp logaddexp2 heaviside xlogy deg2rad rad2deg sinc "
    "special_entr special_xlog1py linspace eye".split()
)
"""Operations that PyTorch itself knows how to take apart."""

NONE, MEAN, SUM = 0, 1, 2
"""ATen's numbers for how a loss is reduced."""


@lru_cache(maxsize=1)
def expansions() -> dict[Any, Callable[..., Any]]:
    """What each operation that is taken apart becomes."""
    known = torch.export.default_decompositions()
    table = {op: part for op, part in known.items() if str(op).split(".")[1] in BY_TORCH and "out" not in str(op)}
    aten = torch.ops.aten
    table[aten.cross_entropy_loss.default] = _cross_entropy
    table[aten.nll_loss_nd.default] = _nll
    return table


def _cross_entropy(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: Any = -100,
    label_smoothing: float = 0.0,
) -> Any:
    """Each sample's loss, then its sum or mean: the one is a reduction of rows, the other of what they give."""
    if reduction == NONE:
        return NotImplemented
    each = torch.ops.aten.cross_entropy_loss.default(x, target, weight, NONE, ignore_index, label_smoothing)
    if reduction == SUM:
        return each.sum()
    if target.dtype == x.dtype:
        return each.sum() / each.numel()
    return each.sum() / _counted(target, weight, ignore_index, x.dtype)


def _nll(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: Any = -100,
) -> torch.Tensor:
    """A look-up for each sample, then the sum or mean."""
    dim = 1 if x.dim() > 1 else 0
    kept = target != ignore_index
    safe = torch.where(kept, target, 0)
    each = -torch.gather(x, dim, safe.unsqueeze(dim)).squeeze(dim)
    if weight is not None:
        each = each * torch.index_select(weight, 0, safe.reshape(-1)).reshape(safe.shape)
    each = torch.where(kept, each, 0.0)
    if reduction == NONE:
        return each
    return each.sum() if reduction == SUM else each.sum() / _counted(target, weight, ignore_index, x.dtype)


def _counted(target: torch.Tensor, weight: torch.Tensor | None, ignore_index: Any, dtype: torch.dtype) -> torch.Tensor:
    """The weight of all samples that count."""
    kept = target != ignore_index
    if weight is None:
        return kept.sum().to(dtype)
    own = torch.index_select(weight, 0, torch.where(kept, target, 0).reshape(-1)).reshape(target.shape)
    return torch.where(kept, own, 0.0).sum()
