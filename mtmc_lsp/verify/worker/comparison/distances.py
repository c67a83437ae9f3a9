"""Distances between results, and where results can be compared at all. Runs in workers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mtmc_lsp.core.dtypes import TOLERANCE
from mtmc_lsp.verify.worker.comparison.batched_reads import computable

PIECE = 1 << 26
"""Elements that are compared at a time: their float64 copies take a few gigabytes at most."""
LEAST = 1e-300
"""Keeps a division by a norm of 0 from failing."""
NOISE = 0.01
"""Where rounding of the inputs alone moves the oracle by this much, the result is rounding noise and says nothing."""


def comparable(own: torch.Tensor, oracle: torch.Tensor) -> torch.Tensor:
    """Where values can be compared.

    What is beyond the dtype's range has no right answer in it: the largest number, as ``nan_to_num`` gives it, is another one.
    So near its end that an error within the tolerance leads beyond it has none either.
    """
    dtype = str(own.dtype).removeprefix("torch.")
    end = torch.finfo(own.dtype).max * (1.0 - TOLERANCE[dtype])
    return finite(own) & finite(oracle) & (oracle.double().abs() <= end)


def finite(values: torch.Tensor) -> torch.Tensor:
    """Where values are neither infinite nor NaN, of float8 too."""
    return torch.isfinite(computable(values))


def pieces(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The same parts of tensors of one shape, each small enough that float64 copies of it take little memory."""
    total = tensors[0].numel()
    if total <= PIECE:
        yield tensors
        return
    if all(tensor.is_contiguous() for tensor in tensors):
        tensors = tuple(tensor.view(-1) for tensor in tensors)
    longest = max(range(tensors[0].dim()), key=lambda dim: tensors[0].shape[dim])
    step = max(1, PIECE * tensors[0].shape[longest] // total)
    yield from zip(*(tensor.split(step, longest) for tensor in tensors), strict=True)


class Distances:
    """L2 distances of results from another one, and that one's L2 norm, added up piece by piece where they are."""

    def __init__(self, device: torch.device) -> None:
        self.apart: list[torch.Tensor] = []
        """Of each result."""
        self.scale = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, other: torch.Tensor, where: torch.Tensor, *results: torch.Tensor) -> None:
        """Take in a piece of each result, as far as ``where`` is true."""
        before = self.apart or [torch.zeros_like(self.scale) for _ in results]
        self.apart = [torch.hypot(d, apart(result, other, where)) for d, result in zip(before, results, strict=True)]
        self.scale = torch.hypot(self.scale, size(other, where))

    def relative(self) -> list[torch.Tensor]:
        """The distances as parts of the norm."""
        return [distance / (self.scale + LEAST) for distance in self.apart]


def apart(result: torch.Tensor, oracle: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """The L2 distance of a result from the oracle's, over the elements ``where`` is true."""
    return size(result.double() - oracle.double(), where)


def size(values: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """The L2 norm of the elements ``where`` is true."""
    return torch.linalg.vector_norm(torch.where(where, values.double(), 0.0))


def sensitivity(moved: torch.Tensor, own: torch.Tensor, oracle: torch.Tensor) -> torch.Tensor:
    """How far the oracle is from itself on inputs that are moved a little, still on the device.

    A relative L2 distance; of integers and truth values the part of them that are others.
    """
    nothing = torch.zeros((), dtype=torch.float64, device=own.device)
    if not moved.shape == own.shape == oracle.shape:
        return nothing
    if not own.is_floating_point():
        return (moved != oracle).double().mean() if own.numel() and not own.is_complex() else nothing
    distances = Distances(own.device)
    for there, theirs, truth in pieces(moved, own, oracle):
        distances.add(truth, comparable(theirs, truth) & finite(there), there)
    return distances.relative()[0]
