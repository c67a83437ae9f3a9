"""Runs the programs of a launch in other orders, or only a sample of them. Runs in workers.

A GPU starts the programs of a grid in no fixed order, while Triton's interpreter runs them one after the other. At a workload's
real sizes, all programs of a grid may take too long. Then the first, the last and random ones run.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from inspect import signature
from random import Random
from time import process_time
from types import FunctionType
from typing import Any

import numpy

from mtmc_lsp.verify.messages import GridOrder
from mtmc_lsp.verify.worker.interpreter.accesses import Positions, ProgramsDepend, StoredMemoryIsLoaded
from mtmc_lsp.verify.worker.interpreter.batches import FEWEST as FEWEST_AT_ONCE
from mtmc_lsp.verify.worker.interpreter.batches import Batches, known_of, memories_of
from mtmc_lsp.verify.worker.interpreter.lane_operations import programs
from mtmc_lsp.verify.worker.interpreter.lanes import Lanes, spread
from mtmc_lsp.verify.worker.interpreter.memory import Memories
from mtmc_lsp.verify.worker.interpreter.operators import is_observed
from mtmc_lsp.verify.worker.interpreter.stores import Stores
from mtmc_lsp.verify.worker.interpreter.turns import Turns, may_wait

Index = tuple[int, int, int]
Run = Callable[[Sequence[int], Callable[[], bool]], int]
"""Runs programs until a function returns true, and returns how many ran."""
ENDS = 4
"""The number of programs at each end of a grid that a sample contains."""
FEWEST = 8
"""The number of random programs in a sample, however long they take."""
BESIDE_SECONDS = 1.0
"""Processor time that the programs beside powers of two may take in a sample; slower ones are left out."""
LEAST_POWER = 5
"""The exponent of the lowest power of two whose neighbours a sample contains: 32, then 64, 128, ..."""
MOST_INTERLEAVED = 64
"""Larger grids are shuffled instead of interleaved: each program is a thread."""
MOST_WAITING = 16
"""The programs that take turns in a launch whose programs may wait for each other. They begin by their index."""
MOST_SECONDS = 20.0
"""Processor time after which no further program of a sample starts, unless the time of a whole grid is longer."""


class Grids:
    """How this process runs grids."""

    order = GridOrder.USUAL
    seed = 0
    seconds, whole_seconds = 0.0, 0.0
    """Processor time for a sample of each grid, and the time that all its programs may take instead."""
    must_compare = False
    """Whether all programs run if a sample of them could not be compared, because they use atomic operations."""
    stores: Stores | None = None
    """Records what the programs store, if they are a sample."""
    turns: Turns | None = None
    """Set while programs run in turns."""
    end = math.inf
    """Processor time at which programs end with an exception."""
    refuses_races = False
    """Whether threads of one program may not load what another one stored, without a barrier between."""

    def __init__(self) -> None:
        self.waiting: set[str] = set()
        """The launched kernels whose programs may wait for each other."""


current = Grids()
_patched: list[Any] = []


@contextlib.contextmanager
def in_order(order: GridOrder, seed: int) -> Iterator[None]:
    """Run all grids in this order."""
    before = current.order, current.seed
    current.order, current.seed = order, seed
    try:
        yield
    finally:
        current.order, current.seed = before


@contextlib.contextmanager
def sampled(seconds: float, whole_seconds: float, *, must_compare: bool) -> Iterator[Stores]:
    """Run a sample of each grid whose programs take longer than ``whole_seconds``, and record its stores.

    The code of the candidate runs by :func:`watched`.
    """
    current.seconds, current.whole_seconds, current.must_compare = seconds, whole_seconds, must_compare
    current.stores = Stores()
    try:
        yield current.stores
    finally:
        current.stores = None


def watched(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function; if grids are sampled, notice which tensors torch reads in it."""
    with current.stores or contextlib.nullcontext():
        return function(*args, **kwargs)


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Let programs raise an exception after this processor time, as soon as they access memory."""
    current.end = process_time() + seconds
    try:
        yield
    finally:
        current.end = math.inf


def _check_time() -> None:
    if current.end < math.inf and process_time() > current.end:
        raise TimeoutError("the program takes too long")


def patch_grids(replace: Callable[[Any, str, Any], None]) -> None:
    """Let :data:`current` decide in which order the programs of a launch run, and which do.

    Args:
        replace: sets an attribute of a class to another function.
    """
    from triton.runtime import interpreter

    if interpreter in _patched:
        return
    _patched.append(interpreter)
    executor, builder = interpreter.GridExecutor, interpreter.interpreter_builder
    call = executor.__call__

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = self.fn
        is_usual = current.stores is None and current.order is GridOrder.USUAL
        if is_usual and is_observed():
            return call(self, *args, **kwargs)
        waits = may_wait(kernel)
        if waits and not is_usual:
            current.waiting.add(kernel.__name__)
        given = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
        launch = Launch(kernel, builder, given, waits=waits)
        grid = self.grid
        self.fn = _like(kernel, launch.run)
        self.grid = lambda meta: _Once(grid(meta) if callable(grid) else grid)
        try:
            return call(self, *args, **kwargs)
        finally:
            self.fn, self.grid = kernel, grid

    replace(executor, "__call__", __call__)
    for name, record in (("create_masked_load", "loaded"), ("create_masked_store", "stored")):
        replace(interpreter.InterpreterBuilder, name, _recorded(getattr(interpreter.InterpreterBuilder, name), record))
    for name, has_mask in (("create_atomic_rmw", True), ("create_atomic_cas", False)):
        operation = _atomic(getattr(interpreter.InterpreterBuilder, name), has_mask=has_mask)
        replace(interpreter.InterpreterBuilder, name, operation)
    barrier = _barrier(interpreter.InterpreterBuilder.create_barrier)
    replace(interpreter.InterpreterBuilder, "create_barrier", barrier)


class _Once(tuple[int, ...]):
    """The size of a grid for which the interpreter makes one step, which runs all programs; none for an empty grid."""

    def __getitem__(self, _: Any) -> Any:
        return int(0 not in self)

    def __add__(self, other: Any) -> _Once:
        return _Once((*self, *other))


def _like(kernel: Any, run: Callable[[dict[str, Any]], None]) -> Any:
    """A function that the interpreter takes for the kernel."""

    def program(**arguments: object) -> None:
        run(arguments)

    # The interpreter looks up the modules of Triton in the function's globals.
    like = FunctionType(program.__code__, kernel.__globals__, kernel.__name__, None, program.__closure__)
    like.__annotations__ = kernel.__annotations__
    like.__signature__ = signature(kernel)  # type: ignore[attr-defined]
    return like


class Launch:
    """One launch of a kernel."""

    def __init__(self, kernel: Any, builder: Any, given: Mapping[str, Any], *, waits: bool) -> None:
        """Prepare without running a program.

        Args:
            given: the arguments as the caller passes them.
            waits: whether programs may wait for each other.
        """
        self._kernel, self._builder, self._given, self._waits = kernel, builder, given, waits

    def run(self, arguments: dict[str, Any]) -> None:
        """Run the programs with the arguments as the interpreter passes them."""
        total, stores = math.prod(self._builder.grid_dim), current.stores
        if not total:
            return
        self._begin()
        began = process_time()
        seed = None if current.order is GridOrder.USUAL else current.seed
        programs.memories = None if is_observed() else Memories(memories_of(self._given.values()), seed)
        if current.refuses_races and not is_observed():
            programs.positions = Positions(self._kernel.__name__)
        try:
            ran = self._run_at_once(arguments, total)
            if ran is None:
                ran = self._run_one_by_one(arguments, total)
        finally:
            programs.memories = programs.positions = None
        if stores is not None:
            stores.end(self._kernel.__name__, ran, total, process_time() - began)

    def _begin(self) -> None:
        if current.stores is not None:
            current.stores.begin(self._given)

    def _run_at_once(self, arguments: dict[str, Any], total: int) -> int | None:
        """Run several programs at a time; returns how many ran, or ``None`` if they must run one after the other."""
        known = known_of(self._kernel, arguments)
        if self._waits or is_observed() or total < FEWEST_AT_ONCE or not known.is_fit:
            return None
        batches = Batches(self._kernel, arguments, self._builder, known, self._begin_program)
        try:
            with batches.recording():
                batches.try_alone(_ordered(total)[0])
                if current.stores is None:
                    return batches.run(_ordered(total), _never)
                return _run_sample(batches.run, total, current.stores)
        except Exception as error:
            # An error of the kernel occurs again.
            self._begin()
            return self._run_at_once(arguments, total) if isinstance(error, StoredMemoryIsLoaded) else None

    def _run_one_by_one(self, arguments: dict[str, Any], total: int) -> int:
        builder, stores = self._builder, current.stores
        grid: Index = builder.grid_dim

        def program(number: int) -> None:
            x, rest = divmod(number, grid[1] * grid[2])
            builder.set_grid_idx(x, *divmod(rest, grid[2]))
            self._begin_program()
            self._kernel(**arguments)

        if self._waits and stores is not None and not current.must_compare:
            return _run_waiting(program, total)
        if self._waits and current.order is not GridOrder.USUAL:
            _run_in_turns(program, total, MOST_WAITING)
        elif current.order is GridOrder.INTERLEAVED and 1 < total <= MOST_INTERLEAVED:
            _run_in_turns(program, total, MOST_INTERLEAVED)
        elif stores is not None and not self._waits:
            return _run_sample(_one_by_one(program), total, stores)
        else:
            for number in _ordered(total):
                program(number)
        return total

    def _begin_program(self) -> None:
        if current.stores is not None:
            current.stores.begin_program()
        _synchronize(self._builder)


def _never() -> bool:
    return False


def _synchronize(builder: Any) -> None:
    """Note that all threads of the current program are at the same place."""
    if programs.positions is not None:
        programs.positions.synchronize(tuple(builder.grid_idx), is_alone=current.turns is None)


def _barrier(original: Any) -> Any:
    def create_barrier(self: Any) -> Any:
        _synchronize(self)
        return original(self)

    return create_barrier


def _run_in_turns(program: Callable[[int], None], total: int, most: int) -> None:
    # In lockstep a program that comes too early for another one may be in time.
    is_uneven = current.order is GridOrder.INTERLEAVED and current.seed // len(GridOrder) % 2
    current.turns = Turns(most, GridOrder.SHUFFLED if is_uneven else current.order, current.seed)
    try:
        current.turns.run(functools.partial(program, number) for number in range(total))
    finally:
        current.turns = None


def _one_by_one(program: Callable[[int], None]) -> Run:
    def run(numbers: Sequence[int], is_over: Callable[[], bool]) -> int:
        for ran, number in enumerate(numbers):
            if is_over():
                return ran
            program(number)
        return len(numbers)

    return run


def _run_waiting(program: Callable[[int], None], total: int) -> int:
    """Run programs that may wait for earlier ones, only the first ones if all take too long; returns their number."""
    began = process_time()
    for number in range(total):
        each = (process_time() - began) / max(number, 1)
        if number >= ENDS and each * total > MOST_SECONDS:
            return number
        program(number)
    return total


def _ordered(total: int) -> Sequence[int]:
    if current.order is GridOrder.USUAL:
        return range(total)
    if current.order is GridOrder.REVERSED:
        return range(total - 1, -1, -1)
    numbers = list(range(total))
    Random(current.seed).shuffle(numbers)
    return numbers


def _run_sample(run: Run, total: int, stores: Stores) -> int:
    """Run the programs of a grid of ``total`` in the current order, or as many as there is time for; returns their number."""
    order = _ordered(total)
    # In the usual order, the last programs may take longer than the first, as in attention with a causal mask.
    first = _ends(total) if current.order is GridOrder.USUAL else order[: 2 * ENDS]
    began, most = process_time(), max(MOST_SECONDS, current.whole_seconds)
    run(first, _never)
    each = (process_time() - began) / len(first)
    later: Iterable[int] = order
    is_long = each * total > current.whole_seconds and stores.may_be_complete(total)
    if is_long and not (current.must_compare and stores.has_atomics):
        count = max(FEWEST, int(current.seconds / each))
        random = Random(current.seed).sample(range(total), min(count, total))
        beside = _beside_powers(total)
        chosen = {*_ends(total), *random, *(beside if each * len(beside) <= BESIDE_SECONDS else ())}
        is_sorted = isinstance(order, range)
        later = sorted(chosen, reverse=order[0] > 0) if is_sorted else [number for number in order if number in chosen]
    done = set(first)
    rest = [number for number in later if number not in done]

    def is_over() -> bool:
        return not current.must_compare and process_time() - began > most

    sample_began = process_time()
    ran = run(rest, is_over)
    if is_long and ran == len(rest) and current.order is GridOrder.USUAL:
        # A few programs alone take longer than as many of a large batch, so the sample tells better what all of them take.
        done.update(rest)
        left = [number for number in order if number not in done]
        if (process_time() - sample_began) / max(ran, 1) * len(left) <= current.whole_seconds:
            ran += run(left, is_over)
    return len(first) + ran


def _ends(total: int) -> Sequence[int]:
    return sorted({*range(min(ENDS, total)), *range(max(total - ENDS, 0), total)})


def _beside_powers(total: int) -> set[int]:
    """The powers of two and the numbers beside them: there kernels that split their work may change their behaviour."""
    powers = [1 << exponent for exponent in range(LEAST_POWER, total.bit_length())]
    return {number for power in powers for number in (power - 1, power, power + 1) if number < total}


def _recorded(original: Any, record: str) -> Any:
    stores = record == "stored"

    def operation(self: Any, ptrs: Any, *rest: Any, **named: Any) -> Any:
        _check_time()
        # The last argument of a load tells whether it is volatile, so that programs may wait by it.
        if current.turns is not None and (stores or rest[-1]):
            _pause(self, current.turns)
            if stores:
                current.turns.note_progress()
        if current.stores is not None:
            # The mask follows the values in a store, and the addresses in a load.
            mask = rest[1] if stores else rest[0]
            arrays, counts = [ptrs.data, mask.data], None
            if any(isinstance(array, Lanes) for array in arrays):
                arrays = spread(arrays)
                counts = arrays[1].reshape(len(arrays[1]), -1).sum(axis=1)
            getattr(current.stores, record)(*arrays, counts)
        return original(self, ptrs, *rest, **named)

    return operation


def _pause(builder: Any, turns: Turns) -> None:
    """Let the other programs run; then the builder is again at this program."""
    index = builder.grid_idx
    turns.pause()
    builder.set_grid_idx(*index)


def _atomic(original: Any, *, has_mask: bool) -> Any:
    def operation(self: Any, ptr: Any, *rest: Any) -> Any:
        _check_time()
        if programs.accesses is not None:
            # It could not be undone.
            raise ProgramsDepend
        if current.stores is not None:
            current.stores.has_atomics = True
        _synchronize(self)
        turns = current.turns
        if turns is None:
            return original(self, ptr, *rest)
        _pause(self, turns)
        with turns.atomic():
            pointer, mask = (rest[0], rest[2]) if has_mask else (ptr, None)
            before = _memory_at(pointer, mask)
            result = original(self, ptr, *rest)
            if (before != _memory_at(pointer, mask)).any():
                turns.note_progress()
        return result

    return operation


def _memory_at(pointer: Any, mask: Any) -> Any:
    from triton.runtime import interpreter

    # The builder's loads take other arguments in each version of Triton.
    data = pointer.data
    kind = interpreter._get_np_dtype(pointer.get_element_ty())
    is_read = numpy.ones_like(data, dtype=bool) if mask is None else mask.data
    return interpreter._interpreter.load(data, is_read, numpy.zeros_like(data, dtype=kind), kind)
