"""Distances between results, and the elements at which results can be compared. Runs in workers."""

from __future__ import annotations

import math
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


def are_all_comparable(reference: torch.Tensor, oracle: torch.Tensor, *results: torch.Tensor) -> bool:
    """Whether all values can be compared and all results are finite, by one pass over each tensor.

    On a GPU it is false, because the answer would have to be waited for.
    """
    if reference.device.type != "cpu" or not reference.numel():
        return False
    limit = torch.finfo(reference.dtype).max * (1.0 - TOLERANCE[str(reference.dtype).removeprefix("torch.")])
    if not _largest(oracle) <= limit:
        return False
    # NaN is the largest value, and larger than no number.
    return all(_largest(values) < math.inf for values in (reference, *results) if values is not oracle)


def _largest(values: torch.Tensor) -> float:
    least, most = torch.aminmax(computable(values.detach()))
    return max(abs(float(least)), abs(float(most)))


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

    def add(self, other: torch.Tensor, where: torch.Tensor | None, *results: torch.Tensor) -> None:
        """Add a piece of each result, at the elements where ``where`` is true; at all if it is ``None``."""
        before = self.values or [torch.zeros_like(self.norm) for _ in results]
        self.values = [
            torch.hypot(d, distance(result, other, where)) for d, result in zip(before, results, strict=True)
        ]
        self.norm = torch.hypot(self.norm, masked_norm(other, where))

    def relative(self) -> list[torch.Tensor]:
        """The distances divided by the norm."""
        return [value / (self.norm + LEAST) for value in self.values]


def distance(result: torch.Tensor, oracle: torch.Tensor, where: torch.Tensor | None) -> torch.Tensor:
    """The L2 distance between a result and the oracle's, over the elements where ``where`` is true."""
    return masked_norm(result.double() - oracle.double(), where)


def masked_norm(values: torch.Tensor, where: torch.Tensor | None) -> torch.Tensor:
    """The L2 norm of the elements where ``where`` is true; of all if it is ``None``."""
    if where is not None:
        return torch.linalg.vector_norm(torch.where(where, values.double(), 0.0))
    # On a CPU this takes a fifth of the time of torch's norm in float64.
    flat = values.double().reshape(-1)
    return torch.dot(flat, flat).sqrt()


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
        is_plain = are_all_comparable(reference_part, oracle_part, part)
        where = None if is_plain else comparable(reference_part, oracle_part) & finite(part)
        distances.add(oracle_part, where, part)
    return distances.relative()[0]
