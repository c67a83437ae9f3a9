"""Keeps the interpolation of images an operator in traces with gradients. Runs in workers.

Torch would trace gathers by positions, whose numbers fix the sizes and whose gradients add atomically. The trace has a custom
operator instead, which appears in the graph as ATen's: its forward pass can be part of a kernel, as without gradients, and its
backward pass is the library's, as in eager mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch._prims_common

from mtmc_lsp.capture.worker.passes.aten_aliases import SINGLE

LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}
"""The linear mode by the number of spatial dimensions."""


_LIBRARIES: list[Any] = []


@cache
def _operator(name: str) -> Any:
    """The custom operator for one of ATen's, defined once per process."""
    library, original = torch.library.Library(SINGLE, "FRAGMENT"), getattr(torch.ops.aten, name).default
    # torch removes the definition with the library object.
    _LIBRARIES.append(library)
    library.define(str(original._schema).removeprefix("aten::"))
    library.impl(name, original, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{SINGLE}::{name}", _gradient if name.endswith("_backward") else _result, lib=library)
    return getattr(getattr(torch.ops, SINGLE), name).default


def _result(x: torch.Tensor, size: Sequence[Any], *options: Any) -> torch.Tensor:
    """A tensor like the result of an operator."""
    empty = x.new_empty([*x.shape[:2], *size])
    return empty.to(memory_format=torch._prims_common.suggest_memory_format(x))


def _gradient(gradient: torch.Tensor, size: Sequence[Any], shape: Sequence[Any], *options: Any) -> torch.Tensor:
    """A tensor like the result of an operator's backward pass."""
    empty = gradient.new_empty(list(shape))
    return empty.to(memory_format=torch._prims_common.suggest_memory_format(gradient))


class _Resampled(torch.autograd.Function):  # type: ignore[misc]  # torch is not typed here
    """An operator of torch and the operator of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str, size: Sequence[Any], options: Sequence[Any]) -> torch.Tensor:
        ctx.about = name, size, options, x.shape
        result: torch.Tensor = _operator(name)(x, size, *options)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        name, size, options, shape = ctx.about
        return _operator(f"{name}_backward")(gradients[0], size, list(shape), *options), None, None, None


def interpolate(
    x: torch.Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Any:
    """``F.interpolate`` to a size, or by whole factors; else ``NotImplemented``."""
    spatial = x.dim() - 2
    is_linear = mode == LINEAR.get(spatial) or (mode == "bicubic" and spatial == 2)
    if spatial not in LINEAR or antialias or recompute_scale_factor or not (mode == "nearest" or is_linear):
        return NotImplemented
    if (size is None) == (scale_factor is None):
        return NotImplemented
    given = size if scale_factor is None else scale_factor
    each = list(given) if isinstance(given, Sequence) else [given] * spatial
    if len(each) != spatial or (scale_factor is not None and any(factor != int(factor) for factor in each)):
        return NotImplemented
    scales = [None] * spatial if scale_factor is None else [float(factor) for factor in each]
    if scale_factor is not None:
        each = [length * int(factor) for length, factor in zip(x.shape[2:], each, strict=True)]
    options = [bool(align_corners), *scales] if is_linear else scales
    return _Resampled.apply(x, f"upsample_{mode}{spatial}d", each, options)
