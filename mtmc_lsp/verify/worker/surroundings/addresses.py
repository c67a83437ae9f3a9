"""Puts tensors at chosen addresses: results must not depend on where memory begins in a page. Runs in workers."""

from __future__ import annotations

import itertools

import torch

from mtmc_lsp.capture.worker.arguments.strided_tensors import shares_elements

PAGE = 4096
PLACES = (0, 64, 2048, 128, 1024, 512, 192, 256, 3072, 320, 4032)
"""Distances from the beginning of a page, in turn: the multiples of 64 bytes that torch's memory has on a CPU."""
_places = itertools.cycle(PLACES)


def moved(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with the same values and strides that begins at another place in a page; the same one if that is not possible."""
    if not tensor.numel() or shares_elements(tensor.shape, tensor.stride()):
        return tensor
    size = tensor.element_size()
    span = 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = torch.empty(span + 2 * PAGE // size, dtype=tensor.dtype, device=tensor.device)
    start = (next(_places) - memory.data_ptr()) % PAGE // size
    placed = memory.as_strided(tensor.shape, tensor.stride(), start)
    placed.copy_(tensor)
    return placed
