"""Values of parameters and buffers for a case: others than the initial ones. Runs in workers.

A network has hundreds of parameters, and each case varies all of them. So what follows from the initial values is computed once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from mtmc_lsp.verify.worker.comparison.batched_reads import numbers


@dataclass(frozen=True)
class _Facts:
    """What is known of the values of a parameter."""

    version: int
    """Of the tensor: a write changes it."""
    is_positive: bool
    """Whether no value is negative."""
    is_fraction: bool
    """Whether all values are from 0 to below 1, as those of a decay: code may take the root of what is left to 1."""
    range: torch.Tensor
    """How far values vary if some are negative."""


_known = WeakTensorKeyDictionary()


def observe(tensors: Iterable[torch.Tensor]) -> None:
    """Compute once what :func:`varied` needs to know of these tensors, with one read from the device."""
    new = [tensor for tensor in tensors if tensor.is_floating_point() and _facts_of(tensor) is None]
    values = [tensor.detach() for tensor in new]
    # 0 for negative values, 1 for fractions, 2 for others.
    kinds = numbers([(value >= 0).all() * (2 - (value < 1).all().int()) for value in values])
    for tensor, value, kind in zip(new, values, kinds, strict=True):
        _known[tensor] = _Facts(_version(tensor), kind > 0, kind == 1, 0.1 * value.abs().mean())


def _facts_of(tensor: torch.Tensor) -> _Facts | None:
    facts: _Facts | None = _known.get(tensor)
    return facts if facts is not None and facts.version == _version(tensor) else None


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def varied(tensor: torch.Tensor, shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """A parameter with values other than the initial ones and zeros, which hide mistakes. Non-negative values stay positive,
    and fractions stay below 1.

    If the case has another shape, the values are drawn with the same mean and standard deviation.

    Args:
        tensor: the initial values, which :func:`observe` has seen.
    """
    if tensor.is_complex():
        return _varied_complex(tensor.detach().resolve_conj(), shape, generator)
    device, value = generator.device, tensor.detach().to(generator.device)
    if not value.is_floating_point():
        is_same = list(value.shape) == list(shape)
        return value.clone() if is_same else value.flatten()[:1].expand(tuple(shape)).clone()
    facts = _facts_of(tensor)
    assert facts is not None
    spread = facts.range.to(device)
    if list(value.shape) != list(shape):
        wide = value.float()
        deviation = wide.std() if value.numel() > 1 else 0.1
        drawn = torch.randn(tuple(shape), generator=generator, device=device)
        value = (wide.mean() + deviation * drawn).to(value.dtype)
        value = value.abs() if facts.is_positive else value
        value = torch.minimum(value, wide.max().to(value.dtype)) if facts.is_fraction else value
        spread = 0.1 * value.abs().mean()
    noise = torch.rand(tuple(shape), generator=generator, device=device)
    if facts.is_positive:
        moved = value * (0.75 + 0.5 * noise) + 0.05 * noise
        if facts.is_fraction:
            moved = torch.minimum(moved, value + 0.5 * (1 - value) * noise)
        return moved.to(value.dtype)
    return (value + spread * (noise - 0.5)).to(value.dtype)


def _varied_complex(tensor: torch.Tensor, shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """A complex parameter, whose real and imaginary parts are varied by themselves."""
    parts = [part.clone() for part in torch.view_as_real(tensor).unbind(-1)]
    observe(parts)
    return torch.complex(*(varied(part, shape, generator) for part in parts))
