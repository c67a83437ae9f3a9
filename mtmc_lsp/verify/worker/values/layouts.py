"""Memory layouts of a verification case's arguments. Runs in workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from mtmc_lsp.capture.index_bounds import index_bounds
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.verify.cases import (
    ALIASED,
    EXPANDED,
    EXPANDED_COLUMNS,
    PACKED,
    SLICED,
    STEPPED,
    STRIDED,
    TRANSPOSED,
    UNALIGNED,
)

GAP = 3
"""The unused columns between the rows of a sliced tensor: an odd number, so that no row is aligned."""


def stated_values(capture: Capture) -> dict[str, object]:
    """By argument, what its values must keep to: a range of the workload, bounds of an index. Others are left out."""
    specs, bounds = capture.workload.tensors, index_bounds(capture.graph)
    result: dict[str, object] = {}
    for leaf in capture.leaves:
        spec = specs.get(leaf.name)
        has_range = spec is not None and spec.low is not None
        low, high, size = (spec.low, spec.high, spec.high_size) if spec and has_range else (leaf.low, leaf.high, None)
        if leaf.input and (low is not None or leaf.input in bounds):
            result[leaf.input] = (low, high, size, bounds.get(leaf.input))
    return result


def other_layout(
    inputs: dict[str, torch.Tensor],
    names: Sequence[str],
    layout: str,
    stated: Mapping[str, object] | None = None,
) -> dict[str, torch.Tensor]:
    """The inputs in one of the layouts of a case: the same values, except where elements share memory.

    Args:
        stated: what the values of arguments must keep to (:func:`stated_values`). Arguments with different statements do not
            share memory. Without it, those share memory that have equal values.
    """
    result = dict(inputs)
    for name in names:
        value = inputs[name]
        if layout == STRIDED and value.dim():
            # The order of the dimensions is reversed in memory, and every second element is unused.
            memory = torch.empty(
                [*reversed(value.shape[:-1]), 2 * value.shape[-1]], dtype=value.dtype, device=value.device
            )
            order = [*reversed(range(value.dim() - 1)), value.dim() - 1]
            result[name] = memory[..., ::2].permute(order).copy_(value)
        if layout == SLICED and value.dim():
            wider = torch.empty([*value.shape[:-1], value.shape[-1] + GAP], dtype=value.dtype, device=value.device)
            result[name] = wider[..., 1 : value.shape[-1] + 1].copy_(value)
        if layout == UNALIGNED:
            memory = torch.empty(value.numel() + 1, dtype=value.dtype, device=value.device)
            result[name] = memory[1:].view(value.shape).copy_(value)
        if layout == STEPPED and value.dim():
            wider = torch.empty([*value.shape[:-1], 3 * value.shape[-1]], dtype=value.dtype, device=value.device)
            result[name] = wider[..., ::3].copy_(value)
        if layout == PACKED and value.dim():
            result[name] = torch.cat([value] * 3, dim=-1).chunk(3, -1)[1]
        if layout == TRANSPOSED and value.dim() > 1:
            # Images are channels-last then.
            inner = min(value.dim() - 2, 1)
            result[name] = value.movedim(inner, -1).contiguous().movedim(-1, inner)
        if layout == EXPANDED and value.dim() and value.numel():
            result[name] = value[:1].expand(value.shape)
        if layout == EXPANDED_COLUMNS and value.dim() > 1 and value.numel():
            result[name] = value[..., :1].expand(value.shape)
    return _aliased(result, names, stated) if layout == ALIASED else result


def _aliased(
    inputs: dict[str, torch.Tensor], names: Sequence[str], stated: Mapping[str, object] | None
) -> dict[str, torch.Tensor]:
    """The inputs, with one tensor for all arguments of a type that may have the same values."""
    result, owners = dict(inputs), list[str]()
    for name in names if stated is None else sorted(names, key=lambda name: name not in stated):
        for owner in owners:
            a, b = inputs[owner], inputs[name]
            if a.shape != b.shape or a.dtype != b.dtype:
                continue
            # Values of a stated range also suit an argument without one.
            if torch.equal(a, b) if stated is None else stated.get(name) in (None, stated.get(owner)):
                result[name] = result[owner]
                break
        else:
            owners.append(name)
    return result
