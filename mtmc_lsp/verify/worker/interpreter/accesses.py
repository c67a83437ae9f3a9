"""Records which programs of a launch access which memory, and undoes their stores. Runs in workers.

Programs give the same results in any order, and at the same time, if none stores to memory that another one loads or stores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy

from mtmc_lsp.verify.worker.interpreter.memory import Memory, Selection

MANY = -1
"""Marks memory that several programs load."""
BITS = {1: numpy.dtype("u1"), 2: numpy.dtype("u2"), 4: numpy.dtype("u4"), 8: numpy.dtype("u8")}


class ProgramsDepend(Exception):
    """Programs access the same memory, or memory about which too little is known."""


class StoredMemoryIsLoaded(Exception):
    """The programs load memory that they store, so that all loads must be recorded."""


@dataclass
class _Users:
    """Which programs access the elements of one tensor."""

    size: int = 0
    """Bytes of an element that is stored, or loaded if loads are recorded."""
    writers: Any = None
    """For each element the number of the program that stored it plus one, or 0."""
    readers: Any = None
    """The same for the program that loaded it, or :data:`MANY`."""
    is_loaded: bool = False


class Accesses:
    """The loads and stores of a launch so far."""

    def __init__(self, *, records_loads: bool) -> None:
        """Begin without any; ``records_loads`` tells whether programs may store to memory that they load themselves."""
        self._users: dict[Memory, _Users] = {}
        self._records_loads = records_loads
        self._undo: list[tuple[Memory, Any, Any]] = []
        self.numbers: Any = numpy.zeros(1, dtype=numpy.int32)
        """The numbers of the programs that run now, plus one."""
        self.largest = 1
        """The most elements of an access of one program."""
        self.stored: list[tuple[Any, Any]] | None = None
        """If set, the addresses and values of all stores are appended, those of each program alone."""

    def load(self, selection: Selection | None, mask: Any, *, is_wide: bool) -> None:
        """Programs load the selected elements.

        Args:
            is_wide: whether the first dimension of the mask is that of the programs; if not, all load the same.
        """
        self._note_size(mask, is_wide=is_wide)
        if selection is None:
            return self._require_none(mask)
        users = self._users_of(selection)
        users.is_loaded = True
        if not self._records_loads:
            if users.writers is not None:
                raise StoredMemoryIsLoaded
            return None
        index = selection.index
        users.readers = self._marks(users, selection, users.readers)
        is_of_all = not is_wide and len(self.numbers) > 1
        numbers = numpy.full(index.shape, MANY, dtype=numpy.int32) if is_of_all else self._numbers(mask)
        before = users.readers[index]
        new = numpy.where((before == 0) | (before == numbers), numbers, MANY)
        users.readers[index] = new
        users.readers[index[users.readers[index] != new]] = MANY
        return None

    def store(self, selection: Selection | None, values: Any, mask: Any, *, is_wide: bool) -> None:
        """Programs will store these values.

        Raises:
            ProgramsDepend: another program stored to the same address.
        """
        self._note_size(mask, is_wide=is_wide)
        if not is_wide and len(self.numbers) > 1:
            raise ProgramsDepend
        if self.stored is not None:
            index = numpy.zeros(0, numpy.int64) if selection is None else selection.index
            self.stored.append((self._split(index, mask), self._split(values[mask], mask)))
        if selection is None:
            return self._require_none(mask)
        users = self._users_of(selection)
        if users.is_loaded and not self._records_loads:
            raise StoredMemoryIsLoaded
        users.writers = self._marks(users, selection, users.writers)
        index, numbers = selection.index, self._numbers(mask)
        before = users.writers[index]
        if ((before != 0) & (before != numbers)).any():
            raise ProgramsDepend
        users.writers[index] = numbers
        if (users.writers[index] != numbers).any():
            raise ProgramsDepend
        self._undo.append((selection.memory, index, selection.memory.elements(BITS[selection.size])[index]))
        return None

    def check(self) -> None:
        """Check the loads against all stores.

        Raises:
            ProgramsDepend: a program stored to memory that another one loads.
        """
        for memory, index, _ in self._undo:
            users = self._users[memory]
            if users.readers is not None:
                readers = users.readers[index]
                if ((readers != 0) & (readers != users.writers[index])).any():
                    raise ProgramsDepend

    def mark(self) -> int:
        """The present state, for :meth:`undo`."""
        return len(self._undo)

    def undo(self, mark: int = 0) -> None:
        """Restore the memory of an earlier state."""
        while len(self._undo) > mark:
            memory, index, before = self._undo.pop()
            memory.elements(before.dtype)[index] = before

    def _note_size(self, mask: Any, *, is_wide: bool) -> None:
        size = mask.size // len(mask) if is_wide else mask.size
        self.largest = max(self.largest, size)

    @staticmethod
    def _require_none(mask: Any) -> None:
        """Elements that are in no known tensor may be those of another program."""
        if mask.any():
            raise ProgramsDepend

    def _users_of(self, selection: Selection) -> _Users:
        return self._users.setdefault(selection.memory, _Users())

    @staticmethod
    def _marks(users: _Users, selection: Selection, marks: Any) -> Any:
        """Marks for each element of a tensor."""
        if users.size not in (0, selection.size):
            raise ProgramsDepend
        users.size = selection.size
        memory = selection.memory
        return numpy.zeros((memory.end - memory.start) // users.size, dtype=numpy.int32) if marks is None else marks

    def _numbers(self, mask: Any) -> Any:
        """The number of the program for each element that a mask selects."""
        if len(self.numbers) == 1:
            return self.numbers
        return numpy.repeat(self.numbers, mask.reshape(len(mask), -1).sum(axis=1))

    def _split(self, selected: Any, mask: Any) -> list[Any]:
        """The elements of each program."""
        if len(self.numbers) == 1:
            return [selected]
        ends = numpy.cumsum(mask.reshape(len(mask), -1).sum(axis=1))
        return numpy.split(selected, ends[:-1])
