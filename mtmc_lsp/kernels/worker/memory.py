"""Memory as a kernel sees it: each tensor has its own range of addresses, so that accesses outside it show. Runs in workers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch

REGION_BITS = 40
"""Width in bits of the address range of each tensor. The tensor starts in the middle of its range."""
MIDDLE = 1 << (REGION_BITS - 1)
MOST_TRACKED_BYTES = 1 << 26
"""Larger tensors are not tracked byte by byte: that takes several times their memory."""


@dataclass
class Region:
    """The storage of one tensor."""

    name: str
    """The kernel's parameter that it was first passed as."""
    address: int
    """The real address of its first byte."""
    size: int
    """In bytes."""
    is_input: bool
    """Whether the caller of the launcher passed it, so that all of it is initialised."""
    storage: Any
    """Kept alive, so that no other tensor gets this address."""
    written: Any = None
    """For each byte, whether a launch wrote it."""
    writer: Any = None
    """For each byte, the program of the current launch that wrote it last, from 1; 0 for none."""
    reader: Any = None
    """The same for the program that read it; -1 for several."""
    atomic: Any = None
    """For each byte, whether the current launch accessed it atomically."""

    def track(self) -> None:
        """Begin to track accesses."""
        if self.size <= MOST_TRACKED_BYTES:
            self.written = numpy.zeros(self.size, dtype=numpy.bool_)
            self.begin_launch()

    def begin_launch(self) -> None:
        """Forget which programs accessed it."""
        if self.written is not None:
            self.writer = numpy.zeros(self.size, dtype=numpy.int32)
            self.reader = numpy.zeros(self.size, dtype=numpy.int32)
            self.atomic = numpy.zeros(self.size, dtype=numpy.bool_)


class Memory:
    """The tensors that kernels of one call access."""

    def __init__(self, inputs: list[torch.Tensor]) -> None:
        self._inputs = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        self._regions: list[Region] = []
        self._by_address: dict[int, int] = {}

    @property
    def regions(self) -> tuple[Region, ...]:
        """All regions, in the order of their first launch."""
        return tuple(self._regions)

    def address(self, tensor: torch.Tensor, name: str) -> int:
        """The address that kernels see for a tensor."""
        storage = tensor.untyped_storage()
        real = storage.data_ptr()
        number = self._by_address.get(real)
        if number is None or self._regions[number].size < storage.nbytes():
            number = len(self._regions)
            self._by_address[real] = number
            region = Region(name, real, storage.nbytes(), real in self._inputs, storage)
            region.track()
            self._regions.append(region)
        return ((number + 1) << REGION_BITS) + MIDDLE + int(tensor.data_ptr()) - int(real)

    def located(self, addresses: Any, mask: Any) -> Iterator[tuple[Region | None, Any, Any]]:
        """For each tensor that addresses belong to: its region, the lanes, and their offsets in bytes."""
        numbers = (addresses >> numpy.uint64(REGION_BITS)).astype(numpy.int64) - 1
        offsets = (addresses & numpy.uint64((1 << REGION_BITS) - 1)).astype(numpy.int64) - MIDDLE
        for number in numpy.unique(numbers[mask]):
            region = self._regions[number] if 0 <= number < len(self._regions) else None
            yield region, mask & (numbers == number), offsets

    def region_of(self, tensor: torch.Tensor) -> Region | None:
        """The region of a tensor that a launch had as an argument."""
        number = self._by_address.get(tensor.untyped_storage().data_ptr())
        return self._regions[number] if number is not None else None

    def begin_launch(self) -> None:
        """A new launch begins: programs of launches before it are complete."""
        for region in self._regions:
            region.begin_launch()


def poison(kind: Any) -> Any:
    """The value of a lane or an element that has no defined value."""
    if numpy.issubdtype(kind, numpy.inexact):
        return numpy.array(numpy.nan, dtype=kind)
    if kind == numpy.bool_:
        return numpy.array(True)
    # The interpreter holds bfloat16 as 16 bits and float8 as 8 bits; these patterns are NaN there.
    bits = {numpy.dtype(numpy.uint16): 0x7FC0, numpy.dtype(numpy.uint8): 0x7F}
    return numpy.array(bits.get(numpy.dtype(kind), numpy.iinfo(kind).max), dtype=kind)


def is_unwritten(values: Any) -> Any:
    """For each element of memory, whether it has the value that new tensors are filled with."""
    if numpy.issubdtype(values.dtype, numpy.inexact):
        return numpy.isnan(values)
    if values.dtype == numpy.uint16:
        return (values & 0x7FFF) > 0x7F80
    return numpy.zeros(values.shape, dtype=bool) if values.itemsize < 4 else values == numpy.iinfo(values.dtype).max


def pattern_of(addresses: Any, mask: Any, size: int) -> str:
    """How the lanes of one access are arranged in memory.

    Args:
        size: of an element in bytes.
    """
    if addresses.size == 1:
        return "scalar"
    wide = addresses.astype(numpy.int64)
    steps = []
    for axis in range(wide.ndim):
        if wide.shape[axis] < 2:
            continue
        first, second = numpy.delete(wide, -1, axis), numpy.delete(wide, 0, axis)
        both = numpy.delete(mask, -1, axis) & numpy.delete(mask, 0, axis)
        steps.append(numpy.unique((second - first)[both]))
    known = [step for step in steps if step.size]
    is_irregular = any(step.size > 1 for step in known)
    if any(step.size == 1 and step[0] == size for step in known):
        return "gathered rows" if is_irregular else "contiguous"
    if is_irregular:
        return "gathered"
    if known and all(step[0] == 0 for step in known):
        return "broadcast"
    return "strided" if known else "scalar"
