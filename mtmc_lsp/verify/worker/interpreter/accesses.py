"""Records which programs of a launch access which memory, and undoes their stores. Runs in workers.

Programs give the same results in any order, and at the same time, if none stores to memory that another one loads or stores.
The same holds for the threads of one program between two barriers.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy

from mtmc_lsp.verify.worker.interpreter.memory import Memory, Selection

MANY = -1
"""Marks memory that several programs load."""
BITS = {1: numpy.dtype("u1"), 2: numpy.dtype("u2"), 4: numpy.dtype("u4"), 8: numpy.dtype("u8")}


LANE_BITS, SHAPE_BITS = 32, 6
"""In the number of a position: the bits of the element's index in its block, and those of the number of the block's shape."""
MOST_UNMARKED = 64
"""Stores of a program that each further access is compared with; those of a longer loop are marked."""
RACE = (
    "{access} of {kernel} (line {line}) {verb} memory that another thread of the program stored before, "
    "without a barrier between; call tl.debug_barrier() between them"
)
OUTSIDE = (
    "a store of {kernel} (line {line}) writes beyond the memory of a tensor, at other elements inside; "
    "its mask must leave out the offsets beyond the size"
)


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

    def store(self, selection: Selection | None, values: Any, mask: Any, *, is_wide: bool) -> bool:
        """Programs will store these values; returns whether one stored to the same address before.

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
            self._require_none(mask)
            return False
        users = self._users_of(selection)
        if users.is_loaded and not self._records_loads:
            raise StoredMemoryIsLoaded
        users.writers = self._marks(users, selection, users.writers)
        index, numbers = selection.index, self._numbers(mask)
        before = users.writers[index]
        is_repeated = bool(before.any())
        if is_repeated and ((before != 0) & (before != numbers)).any():
            raise ProgramsDepend
        users.writers[index] = numbers
        if (users.writers[index] != numbers).any():
            raise ProgramsDepend
        self._undo.append((selection.memory, index, selection.memory.elements(BITS[selection.size])[index]))
        return is_repeated

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


class WrongAccess(Exception):
    """Threads of one program access the same memory without a barrier between, or store outside of it."""


class Positions:
    """At which positions of their blocks programs stored the elements of memory since their last barriers.

    The same position of blocks with one shape belongs to the same thread. Another thread need not see what this one stored.
    """

    def __init__(self, kernel: str) -> None:
        self._kernel = kernel
        self._stored: dict[tuple[Memory, int], list[tuple[int, Selection, Any, bool]]] = {}
        """Stores that have no marks yet, by memory and size of the elements: the period of each, its elements and mask."""
        self._marks: dict[tuple[Memory, int], Any] = {}
        """For each element of memory that is accessed again, the period and position of the last store."""
        self._periods: dict[Hashable, int] = {}
        """The number of the current period between two barriers, by program."""
        self._count = 0
        self._shapes: dict[tuple[int, ...], int] = {}

    def synchronize(self, program: Hashable, *, is_alone: bool) -> None:
        """A program begins, or all its threads are at a barrier; ``is_alone`` tells whether no other program is between two."""
        self._count += 1
        self._periods[program] = self._count
        if is_alone:
            self._stored.clear()

    def load(self, program: Hashable, selection: Selection, mask: Any, *, is_wide: bool) -> bool:
        """Whether a thread of the program loads what another one stored."""
        marks = self._marks_of(selection)
        return marks is not None and bool(self._is_of_others(program, marks, selection, mask, is_wide=is_wide).any())

    def store(
        self, program: Hashable, selection: Selection, values: Any, mask: Any, *, is_wide: bool, is_repeated: bool
    ) -> bool:
        """Whether a thread of the program will store another value than another one did.

        Args:
            is_repeated: whether the program may have stored to these addresses before.
        """
        marks = self._marks_of(selection) if is_repeated else self._marks.get((selection.memory, selection.size))
        if marks is None:
            key = (selection.memory, selection.size)
            self._stored.setdefault(key, []).append((self._periods[program], selection, mask, is_wide))
            return False
        is_race = False
        if is_repeated:
            others = self._is_of_others(program, marks, selection, mask, is_wide=is_wide)
            if others.any():
                bits = BITS[selection.size]
                new = values.reshape(-1) if selection.is_whole else values[mask]
                is_race = bool((others & (selection.memory.elements(bits)[selection.index] != new.view(bits))).any())
        marks[selection.index] = self._numbers(self._periods[program], mask, is_wide=is_wide)
        return is_race

    def race(self, *, is_load: bool) -> str:
        """The message about the access that the kernel makes now."""
        access, verb = ("a load", "reads") if is_load else ("a store", "overwrites")
        return RACE.format(access=access, kernel=self._kernel, line=_line_of_kernel(), verb=verb)

    def outside(self) -> str:
        """The message about a store beyond the memory of a tensor that the kernel makes now."""
        return OUTSIDE.format(kernel=self._kernel, line=_line_of_kernel())

    def _marks_of(self, selection: Selection) -> Any:
        """The marks of memory if the program may have stored to the selected elements, else ``None``."""
        key = (selection.memory, selection.size)
        if key not in self._marks:
            stores = self._stored.get(key, [])
            overlaps = (s.first <= selection.last and selection.first <= s.last for _, s, _, _ in stores)
            if len(stores) < MOST_UNMARKED and not any(overlaps):
                return None
            memory = selection.memory
            marks = self._marks[key] = numpy.zeros((memory.end - memory.start) // selection.size, dtype=numpy.int64)
            for period, stored, mask, is_wide in self._stored.pop(key):
                marks[stored.index] = self._numbers(period, mask, is_wide=is_wide)
        return self._marks[key]

    def _is_of_others(self, program: Hashable, marks: Any, selection: Selection, mask: Any, *, is_wide: bool) -> Any:
        """For each selected element whether another thread stored it since the last barrier."""
        before, period = marks[selection.index], self._periods[program]
        is_recent = before >> (LANE_BITS + SHAPE_BITS) == period
        return is_recent & (before != self._numbers(period, mask, is_wide=is_wide)) if is_recent.any() else is_recent

    def _numbers(self, period: int, mask: Any, *, is_wide: bool) -> Any:
        """The number of the position of each element that a mask selects."""
        shape = mask.shape[1:] if is_wide else mask.shape
        number = self._shapes.setdefault(shape, len(self._shapes)) % (1 << SHAPE_BITS)
        first = (period << SHAPE_BITS | number) << LANE_BITS
        lanes = numpy.arange(first, first + mask[0].size if is_wide else first + mask.size, dtype=numpy.int64)
        return numpy.broadcast_to(lanes.reshape(shape), mask.shape)[mask]


def _line_of_kernel() -> int:
    """The line of the kernel, or of a function that it calls, that runs now."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("mtmc_lsp", "triton"):
        frame = frame.f_back
    return frame.f_lineno
