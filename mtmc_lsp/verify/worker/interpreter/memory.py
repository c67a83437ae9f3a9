"""Loads and stores elements of a launch's tensors by numpy, which takes a tenth of the interpreter's time. Runs in workers."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy


class Memory:
    """The memory of one tensor."""

    def __init__(self, start: int, end: int) -> None:
        """Describe the memory from one address up to, and without, another one."""
        self.start, self.end = start, end
        self._views: dict[Any, Any] = {}

    def elements(self, dtype: Any) -> Any:
        """The memory as an array."""
        if dtype not in self._views:
            size = (self.end - self.start) // dtype.itemsize * dtype.itemsize
            buffer = (ctypes.c_uint8 * size).from_address(self.start)
            self._views[dtype] = numpy.frombuffer(buffer, dtype=dtype)
        return self._views[dtype]


class Selection:
    """The elements of an access that a mask selects; all are in one tensor."""

    def __init__(
        self, memory: Memory, index: Any, size: int, *, is_whole: bool, ends: tuple[int, int], random: Any
    ) -> None:
        self.memory, self.index, self.size, self.is_whole, self._random = memory, index, size, is_whole, random
        self.first, self.last = ends
        """The lowest and the highest address."""

    def load(self, mask: Any, other: Any, dtype: Any) -> Any:
        """The elements, with ``other`` where the mask is not set."""
        values = self.memory.elements(dtype)[self.index]
        if self.is_whole:
            return values.reshape(mask.shape)
        loaded = numpy.zeros(mask.shape, dtype) if other is None else numpy.array(other, dtype=dtype, order="C")
        loaded[mask] = values
        return loaded

    def store(self, values: Any, mask: Any) -> None:
        """Store the values where the mask is set; of several values for one address, the last or a random one remains."""
        elements, chosen = self.memory.elements(values.dtype), values.reshape(-1) if self.is_whole else values[mask]
        elements[self.index] = chosen
        # Another value remained only if an address occurs twice. NaN looks like one, and is stored again.
        if self._random is not None and (elements[self.index] != chosen).any():
            order = self._random.permutation(chosen.size)
            elements[self.index[order]] = chosen[order]


class Memories:
    """The memory of all tensors of a launch."""

    def __init__(self, ranges: Sequence[tuple[int, int]], seed: int | None = None) -> None:
        """Describe the memory.

        Args:
            ranges: the first address of each tensor, and the one after the last; tensors that share memory are one.
            seed: if set, which elements of a store remain where several have one address is random, as on a GPU.
        """
        merged: list[tuple[int, int]] = []
        for start, end in sorted(ranges):
            if merged and start < merged[-1][1]:
                merged[-1] = merged[-1][0], max(end, merged[-1][1])
            else:
                merged.append((start, end))
        self._all = [Memory(start, end) for start, end in merged]
        self._random = None if seed is None else numpy.random.default_rng(seed)

    def select(self, addresses: Any, mask: Any, size: int) -> Selection | None:
        """The elements of ``size`` bytes at these addresses; ``None`` if they are not in one tensor, or if there are none."""
        is_whole = bool(mask.all())
        chosen = addresses.reshape(-1) if is_whole else addresses[mask]
        if not chosen.size:
            return None
        first, last = int(chosen.min()), int(chosen.max())
        memory = next((each for each in self._all if each.start <= first and last + size <= each.end), None)
        if memory is None:
            return None
        offsets = chosen - numpy.uint64(memory.start)
        # Sizes are powers of two, and shifts are faster than divisions.
        if (offsets & numpy.uint64(size - 1)).any():
            return None
        index = (offsets >> numpy.uint64(size.bit_length() - 1)).view(numpy.int64)
        return Selection(memory, index, size, is_whole=is_whole, ends=(first, last), random=self._random)

    def crosses_end(self, addresses: Any, mask: Any, size: int) -> bool:
        """Whether some of the selected elements are in tensors, and others are in none."""
        chosen = addresses[mask]
        is_inside = numpy.zeros(chosen.shape, dtype=bool)
        for memory in self._all:
            is_inside |= (chosen >= memory.start) & (chosen + numpy.uint64(size) <= memory.end)
        return bool(is_inside.any()) and not is_inside.all()

    def shuffled(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """The arrays of a store whose elements are not in one tensor, in a random order if a seed is set."""
        if self._random is None:
            return arrays
        order = self._random.permutation(arrays[0].size)
        return [array.reshape(-1)[order] for array in arrays]
