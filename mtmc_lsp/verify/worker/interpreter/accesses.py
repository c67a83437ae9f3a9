"""Records which programs of a launch access which memory, and undoes their stores. Runs in workers.

Programs give the same results in any order, and at the same time, if none stores to memory that another one loads or stores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy

MANY = -1
"""Marks memory that several programs load."""


class ProgramsDepend(Exception):
    """Programs access the same memory, or memory about which too little is known."""


class StoredMemoryIsLoaded(Exception):
    """The programs load memory that they store, so that all loads must be recorded."""


@dataclass
class _Memory:
    """The memory of one tensor of the launch."""

    start: int
    end: int
    size: int = 0
    """Bytes of an element that is stored, or loaded if loads are recorded."""
    writers: Any = None
    """For each element the number of the program that stored it plus one, or 0."""
    readers: Any = None
    """The same for the program that loaded it, or :data:`MANY`."""
    is_loaded: bool = False


class Accesses:
    """The loads and stores of a launch so far."""

    def __init__(self, memories: Sequence[tuple[int, int]], *, records_loads: bool) -> None:
        """Begin without any.

        Args:
            memories: first address, and the one after the last, of the launch's tensors.
            records_loads: whether programs may store to memory that they load themselves.
        """
        self._memories = [_Memory(start, end) for start, end in sorted(set(memories))]
        self._records_loads = records_loads
        self._undo: list[tuple[Any, Any, Any]] = []
        self.numbers: Any = numpy.zeros(1, dtype=numpy.int32)
        """The numbers of the programs that run now, plus one."""
        self.largest = 1
        """The most elements of an access of one program."""
        self.stored: list[tuple[Any, Any]] | None = None
        """If set, the addresses and values of all stores are appended."""

    def load(self, addresses: Any, mask: Any, size: int, *, is_wide: bool) -> None:
        """Programs load elements of ``size`` bytes.

        Args:
            is_wide: whether the first dimension of the arrays is that of the programs; if not, all load the same.
        """
        self._note_size(addresses, is_wide=is_wide)
        loaded = addresses[mask]
        if not loaded.size:
            return
        memory = self._memory(loaded)
        memory.is_loaded = True
        if not self._records_loads:
            if memory.writers is not None:
                raise StoredMemoryIsLoaded
            return
        if memory.readers is None:
            self._set_size(memory, size)
            memory.readers = numpy.zeros((memory.end - memory.start) // size, dtype=numpy.int32)
        index = self._index(memory, loaded, size)
        is_of_all = not is_wide and len(self.numbers) > 1
        numbers = numpy.full(index.shape, MANY, dtype=numpy.int32) if is_of_all else self._numbers(mask)
        before = memory.readers[index]
        new = numpy.where((before == 0) | (before == numbers), numbers, MANY)
        memory.readers[index] = new
        memory.readers[index[memory.readers[index] != new]] = MANY

    def store(self, addresses: Any, values: Any, mask: Any, *, is_wide: bool) -> None:
        """Programs will store these values.

        Raises:
            ProgramsDepend: another program stored to the same address.
        """
        self._note_size(addresses, is_wide=is_wide)
        if not is_wide and len(self.numbers) > 1:
            raise ProgramsDepend
        stored = addresses[mask]
        if self.stored is not None:
            self.stored.append((self._split(stored, mask), self._split(values[mask], mask)))
        if not stored.size:
            return
        memory, size = self._memory(stored), int(values.itemsize)
        if memory.is_loaded and not self._records_loads:
            raise StoredMemoryIsLoaded
        if memory.writers is None:
            self._set_size(memory, size)
            memory.writers = numpy.zeros((memory.end - memory.start) // size, dtype=numpy.int32)
        index, numbers = self._index(memory, stored, size), self._numbers(mask)
        before = memory.writers[index]
        if ((before != 0) & (before != numbers)).any():
            raise ProgramsDepend
        memory.writers[index] = numbers
        if (memory.writers[index] != numbers).any():
            raise ProgramsDepend
        self._undo.append((memory, index, self._elements(memory)[index]))

    def check(self) -> None:
        """Check the loads against all stores.

        Raises:
            ProgramsDepend: a program stored to memory that another one loads.
        """
        for memory, index, _ in self._undo:
            if memory.readers is not None:
                readers = memory.readers[index]
                if ((readers != 0) & (readers != memory.writers[index])).any():
                    raise ProgramsDepend

    def mark(self) -> int:
        """The present state, for :meth:`undo`."""
        return len(self._undo)

    def undo(self, mark: int = 0) -> None:
        """Restore the memory of an earlier state."""
        while len(self._undo) > mark:
            memory, index, before = self._undo.pop()
            self._elements(memory)[index] = before

    def _note_size(self, addresses: Any, *, is_wide: bool) -> None:
        size = addresses.size // len(addresses) if is_wide else addresses.size
        self.largest = max(self.largest, size)

    def _memory(self, addresses: Any) -> _Memory:
        first, last = int(addresses.min()), int(addresses.max())
        for memory in self._memories:
            if memory.start <= first and last < memory.end:
                return memory
        raise ProgramsDepend

    @staticmethod
    def _set_size(memory: _Memory, size: int) -> None:
        if memory.size not in (0, size):
            raise ProgramsDepend
        memory.size = size

    @staticmethod
    def _index(memory: _Memory, addresses: Any, size: int) -> Any:
        offsets = addresses - numpy.uint64(memory.start)
        # Sizes are powers of two, and shifts are faster than divisions.
        if memory.size != size or (offsets & numpy.uint64(size - 1)).any():
            raise ProgramsDepend
        return (offsets >> numpy.uint64(size.bit_length() - 1)).view(numpy.int64)

    def _numbers(self, mask: Any) -> Any:
        """The number of the program for each element that a mask selects."""
        if len(self.numbers) == 1:
            return self.numbers
        counts = mask.reshape(len(mask), -1).sum(axis=1)
        return numpy.repeat(self.numbers, counts)

    def _split(self, selected: Any, mask: Any) -> list[Any]:
        """The elements of each program."""
        if len(self.numbers) == 1:
            return [selected]
        ends = numpy.cumsum(mask.reshape(len(mask), -1).sum(axis=1))
        return numpy.split(selected, ends[:-1])

    @staticmethod
    def _elements(memory: _Memory) -> Any:
        """The memory itself as an array of elements."""
        import ctypes

        count = (memory.end - memory.start) // memory.size
        buffer = (ctypes.c_uint8 * (count * memory.size)).from_address(memory.start)
        return numpy.frombuffer(buffer, dtype=f"u{memory.size}")
