"""Runs several programs of a launch at once, as one numpy operation each. Runs in workers.

The results are then those of all orders in which programs can run, if no program stores to memory that another one loads or
stores. Otherwise all stores are undone, and the programs run one after the other in the order of the case. The same happens if
the kernel has an operation that several programs cannot run at once. The first program of each kernel runs alone as well, and
must store the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy
import torch

from mtmc_lsp.verify.worker.interpreter.accesses import Accesses, ProgramsDepend, StoredMemoryIsLoaded
from mtmc_lsp.verify.worker.interpreter.lane_operations import programs
from mtmc_lsp.verify.worker.interpreter.lanes import ProgramsDiffer

FEWEST = 4
"""Launches with fewer programs run one after the other."""
MOST_ELEMENTS = 1 << 17
"""Limit for the elements of one operation of all programs: more do not fit into the processor's cache."""
TILES_TO_ACCESSES = 8
"""So many times this limit is that for tiles that are neither loaded nor stored."""
MOST_PROGRAMS = 1024
MOST_SPLITS = 64
"""How often in a launch programs are divided because they differ in a branch; later ones run alone."""

Stored = list[tuple[Any, Any]]


class _Known:
    """Facts about a kernel with certain types and constants, from earlier launches in this process."""

    def __init__(self) -> None:
        self.is_fit = True
        self.records_loads = False
        self.largest = 0
        """The most elements of an access of one program, or a share of its largest tile; 0 before the first launch."""


_known: dict[tuple[Any, ...], _Known] = {}


def known_of(kernel: Any, arguments: Mapping[str, Any]) -> _Known:
    """The facts about a kernel with the types and constants of these arguments."""
    types = (str(getattr(value, "type", None) or repr(value)) for value in arguments.values())
    return _known.setdefault((kernel, *types), _Known())


def memories_of(values: Any) -> list[tuple[int, int]]:
    """The memory of the tensors among a launch's arguments: first address, and the one after the last."""
    memories = []
    for value in values:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            memories.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
        elif isinstance(value, (tuple, list)):
            memories += memories_of(value)
        elif hasattr(value, "base"):
            memories += memories_of((value.base,))
    return memories


@contextmanager
def _measured() -> Iterator[set[int]]:
    """The numbers of elements that tiles have; also those that are neither loaded nor stored, as differences of all pairs."""
    from triton.runtime.interpreter import TensorHandle

    sizes, original = {1}, TensorHandle.__init__

    def __init__(self: Any, data: Any, *rest: Any, **named: Any) -> None:
        sizes.add(data.size)
        original(self, data, *rest, **named)

    TensorHandle.__init__ = __init__
    try:
        yield sizes
    finally:
        TensorHandle.__init__ = original


class Batches:
    """The programs of one launch."""

    def __init__(
        self,
        kernel: Any,
        arguments: dict[str, Any],
        builder: Any,
        known: _Known,
        begin: Callable[[], None],
    ) -> None:
        """Prepare without running a program.

        Args:
            builder: of the interpreter, with the size of the grid.
            begin: called before each run of programs.
        """
        self._kernel, self._arguments, self._builder, self._known, self._begin = (
            kernel,
            arguments,
            builder,
            known,
            begin,
        )
        self._accesses = Accesses(records_loads=known.records_loads)
        self._expected: tuple[int, Stored] | None = None
        """The number of a program that ran alone, with what it stored."""
        self._splits = self._calls = 0
        """How often programs were divided, and how often the kernel was called."""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record all accesses; at the end check them. An exception undoes all stores."""
        programs.accesses = self._accesses
        try:
            yield
            self._accesses.check()
        except BaseException as error:
            self._accesses.undo()
            if isinstance(error, StoredMemoryIsLoaded):
                self._known.records_loads = True
                # The programs begin again, and the first one runs alone again.
                self._known.largest = 0
            else:
                self._known.is_fit = False
            raise
        finally:
            programs.accesses = None

    def run_one(self, number: int) -> None:
        """Run one program alone."""
        self._accesses.numbers = numpy.array([number + 1], dtype=numpy.int32)
        self._builder.set_grid_idx(*self._index(number))
        self._begin()
        self._kernel(**self._arguments)

    def try_alone(self, number: int) -> None:
        """Run a program, keep what it stores, and undo that; not for a kernel that ran before."""
        if self._known.largest:
            return
        mark = self._accesses.mark()
        self._accesses.stored = []
        with _measured() as sizes:
            self.run_one(number)
        self._expected = number, self._accesses.stored
        self._accesses.stored = None
        self._accesses.undo(mark)
        self._known.largest = max(self._accesses.largest, max(sizes) // TILES_TO_ACCESSES)

    def run(self, numbers: Sequence[int], is_over: Callable[[], bool]) -> int:
        """Run programs, several at once, until the time is over; returns how many ran.

        Raises:
            ProgramsDepend: they must run one after the other.
        """
        ran = 0
        most = min(MOST_PROGRAMS, MOST_ELEMENTS // max(self._known.largest, 1))
        if most < FEWEST:
            raise ProgramsDepend
        while ran < len(numbers) and not is_over():
            batch = numbers[ran : ran + most]
            self._run_together(batch)
            ran += len(batch)
        # If it was called nearly as often as there are programs, trying costs more than it saves.
        self._known.is_fit = 2 * self._calls <= ran or ran < FEWEST
        return ran

    def _run_alone(self, numbers: Sequence[int]) -> None:
        self._calls += len(numbers)
        for number in numbers:
            self.run_one(number)

    def _run_together(self, numbers: Sequence[int]) -> None:
        if len(numbers) == 1 or self._splits >= MOST_SPLITS:
            self._run_alone(numbers)
            return
        accesses, mark = self._accesses, self._accesses.mark()
        is_compared = self._expected is not None and self._expected[0] == numbers[0]
        accesses.stored = [] if is_compared else None
        accesses.numbers = numpy.array(numbers, dtype=numpy.int32) + 1
        x, y, z = self._index(numpy.array(numbers, dtype=numpy.int32))
        self._builder.set_grid_idx(int(x[0]), int(y[0]), int(z[0]))
        self._begin()
        self._calls += 1
        programs.index = x, y, z
        try:
            self._kernel(**self._arguments)
        except ProgramsDiffer as difference:
            programs.index = None
            accesses.undo(mark)
            for group in self._groups(numbers, difference.values):
                self._run_together(group)
            return
        finally:
            programs.index = None
        if is_compared:
            self._compare(accesses.stored or [])

    def _groups(self, numbers: Sequence[int], values: Any) -> list[list[int]]:
        """The programs with equal values; if few are equal, each program."""
        kinds, group_of = numpy.unique(values, return_inverse=True)
        self._splits += 1
        if not 1 < len(kinds) <= len(numbers) // 2:
            return [[number] for number in numbers]
        return [[n for n, g in zip(numbers, group_of, strict=True) if g == group] for group in range(len(kinds))]

    def _compare(self, stored: Stored) -> None:
        """Compare what the first program stores with what it stored alone."""
        assert self._expected is not None
        alone = self._expected[1]
        pairs = zip(alone, stored, strict=False)
        same = (_is_same(one[0], many[0]) for before, after in pairs for one, many in zip(before, after, strict=True))
        if len(alone) != len(stored) or not all(same):
            raise ProgramsDepend
        self._expected = None

    def _index(self, number: Any) -> tuple[Any, Any, Any]:
        grid = self._builder.grid_dim
        x, rest = divmod(number, grid[1] * grid[2])
        return (x, *divmod(rest, grid[2]))


def _is_same(first: Any, second: Any) -> bool:
    return bool(numpy.array_equal(first, second, equal_nan=first.dtype.kind == "f"))
