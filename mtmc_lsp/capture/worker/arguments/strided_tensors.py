"""Tensors of any strides: expanded (stride 0), overlapping (windows of one memory) and with gaps. Runs in workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def extent_of(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Number of elements from the first to the last one in memory."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def shares_elements(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether several elements may be one in memory, so that none can be written by itself."""
    reach = 0
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1):
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def laid_out(value: torch.Tensor, strides: Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """A new tensor with these values and strides, optionally of another dtype.

    Elements that are one in memory get one of their values.
    """
    shape, kind = value.shape, dtype or value.dtype
    if value.numel():
        value = value[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)]
    if not shares_elements(value.shape, strides):
        stored = torch.empty_strided(value.shape, tuple(strides), dtype=kind, device=value.device)
        return stored.copy_(value).as_strided(shape, tuple(strides))
    extent = extent_of(value.shape, strides)
    if tuple(value.stride()) == tuple(strides):
        stored = value.detach().as_strided((extent,), (1,)).to(kind, copy=True)
    else:
        stored = torch.zeros(extent, dtype=kind, device=value.device)
        positions = torch.arange(extent, device=value.device).as_strided(value.shape, tuple(strides))
        stored[positions] = value.detach().to(kind)
    return stored.as_strided(shape, tuple(strides))


def filled(
    shape: Sequence[int], strides: Sequence[int], values: Callable[[Sequence[int]], torch.Tensor]
) -> torch.Tensor:
    """A tensor of these strides. ``values`` creates a dense tensor of a shape.

    If elements are one in memory, ``values`` creates the memory.
    """
    if not shares_elements(shape, strides):
        value = values(shape)
        return value if list(value.stride()) == list(strides) or not value.numel() else laid_out(value, strides)
    return values([extent_of(shape, strides)]).as_strided(tuple(shape), tuple(strides))


def is_other_view(view: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether a tensor is a view of another one, or of a part of it, with the same dtype. It is not that tensor itself."""
    shares_memory = view.untyped_storage()._cdata == tensor.untyped_storage()._cdata
    return view is not tensor and shares_memory and view.dtype == tensor.dtype


def on_device(value: torch.Tensor, device: str) -> torch.Tensor:
    """The tensor on a device, with the same strides."""
    if value.device.type == device:
        return value
    moved = value.to(device)
    if moved.stride() == value.stride():
        return moved
    return laid_out(moved.detach(), value.stride()).requires_grad_(value.requires_grad)
