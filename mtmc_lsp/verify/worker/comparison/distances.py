"""Distances between results, and the elements at which results can be compared. Runs in workers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mtmc_lsp.core.dtypes import TOLERANCE
from mtmc_lsp.verify.error_limits import LEAST
from mtmc_lsp.verify.worker.comparison.batched_reads import computable

PIECE = 1 << 26
"""Elements that are compared at a time: their float64 copies need at most a few gigabytes."""
CPU_PIECE = 1 << 20
"""The same for sums over all elements on a CPU, where copies that fit into a cache are faster: 0.24 instead of 1.16 s for
15 million elements."""


def comparable(reference: torch.Tensor, oracle: torch.Tensor) -> torch.Tensor:
    """Where values can be compared.

    A value beyond the dtype's range has no correct result in that dtype; the largest number, as ``nan_to_num`` returns it,
    differs between dtypes. The same holds for values so close to the end of the range that a permitted error exceeds it.
    """
    dtype = str(reference.dtype).removeprefix("torch.")
    limit = torch.finfo(reference.dtype).max * (1.0 - TOLERANCE[dtype])
    return finite(reference) & finite(oracle) & (oracle.double().abs() <= limit)


def finite(values: torch.Tensor) -> torch.Tensor:
    """Where values are neither infinite nor NaN; also for float8."""
    return torch.isfinite(computable(values))


def sums_piece(tensor: torch.Tensor) -> int:
    """Elements of a tensor of which sums are computed at a time."""
    return CPU_PIECE if tensor.device.type == "cpu" else PIECE


def pieces(*tensors: torch.Tensor, most: int = PIECE) -> Iterator[tuple[torch.Tensor, ...]]:
    """The same parts of tensors of one shape, each with about ``most`` elements, so that float64 copies need little memory."""
    total = tensors[0].numel()
    if total <= most:
        yield tensors
        return
    if all(tensor.is_contiguous() for tensor in tensors):
        tensors = tuple(tensor.view(-1) for tensor in tensors)
    longest = max(range(tensors[0].dim()), key=lambda dim: tensors[0].shape[dim])
    step = max(1, most * tensors[0].shape[longest] // total)
    yield from zip(*(tensor.split(step, longest) for tensor in tensors), strict=True)


class Distances:
    """L2 distances of results from another result, and its L2 norm, accumulated piece by piece on the device."""

    def __init__(self, device: torch.device) -> None:
        self.values: list[torch.Tensor] = []
        """The distance of each result."""
        self.norm = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, other: torch.Tensor, where: torch.Tensor, *results: torch.Tensor) -> None:
        """Add a piece of each result, at the elements where ``where`` is true."""
        before = self.values or [torch.zeros_like(self.norm) for _ in results]
        self.values = [
            torch.hypot(d, distance(result, other, where)) for d, result in zip(before, results, strict=True)
        ]
        self.norm = torch.hypot(self.norm, masked_norm(other, where))

    def relative(self) -> list[torch.Tensor]:
        """The distances divided by the norm."""
        return [value / (self.norm + LEAST) for value in self.values]


def distance(result: torch.Tensor, oracle: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """The L2 distance between a result and the oracle's, over the elements where ``where`` is true."""
    return masked_norm(result.double() - oracle.double(), where)


def masked_norm(values: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """The L2 norm of the elements where ``where`` is true."""
    return torch.linalg.vector_norm(torch.where(where, values.double(), 0.0))


def oracle_distance(result: torch.Tensor, reference: torch.Tensor, oracle: torch.Tensor) -> torch.Tensor:
    """The relative L2 distance between a result and the oracle's, still on the device.

    For integers and booleans, the part of the elements that differ. 0 if the results cannot be compared.
    """
    zero = torch.zeros((), dtype=torch.float64, device=reference.device)
    if not result.shape == reference.shape == oracle.shape:
        return zero
    if not reference.is_floating_point():
        is_ordinary = reference.numel() and not reference.is_complex()
        return (result != oracle).double().mean() if is_ordinary else zero
    distances = Distances(reference.device)
    for part, reference_part, oracle_part in pieces(result, reference, oracle, most=sums_piece(reference)):
        distances.add(oracle_part, comparable(reference_part, oracle_part) & finite(part), part)
    return distances.relative()[0]
