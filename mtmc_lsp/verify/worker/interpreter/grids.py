"""Runs the programs of a launch in other orders, or only a sample of them. Runs in workers.

A GPU starts the programs of a grid in no fixed order, while Triton's interpreter runs them one after the other. At a workload's
real sizes, all programs of a grid may take too long. Then the first, the last and random ones run.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from inspect import signature
from random import Random
from time import process_time
from types import FunctionType
from typing import Any

from mtmc_lsp.verify.messages import GridOrder
from mtmc_lsp.verify.worker.interpreter.stores import Stores
from mtmc_lsp.verify.worker.interpreter.turns import Turns

Index = tuple[int, int, int]
ENDS = 4
"""The number of programs at each end of a grid that a sample contains."""
FEWEST = 8
"""The number of random programs in a sample, however long they take."""
LEAST_POWER = 5
"""The exponent of the lowest power of two whose neighbours a sample contains: 32, then 64, 128, ..."""
MOST_INTERLEAVED = 64
"""Larger grids are shuffled instead of interleaved: each program is a thread."""
MOST_SECONDS = 20.0
"""Processor time after which no further program of a sample starts."""
WAITS = frozenset(("atomic_cas", "atomic_xchg", "atomic_poll", "volatile"))
"""Names of operations and arguments by which a program may wait for another one, which would then have to run before it."""


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

    What torch reads is recorded only while the recorder itself is a context.
    """
    current.seconds, current.whole_seconds, current.must_compare = seconds, whole_seconds, must_compare
    current.stores = Stores()
    try:
        yield current.stores
    finally:
        current.stores = None


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
        waits = not is_usual and _may_wait(kernel)
        if is_usual or (current.stores is None and waits):
            return call(self, *args, **kwargs)
        if current.stores is not None:
            current.stores.begin([*args, *kwargs.values()])
        self.fn = _once(kernel, lambda arguments: _run(kernel, arguments, builder, waits=waits))
        try:
            return call(self, *args, **kwargs)
        finally:
            self.fn = kernel

    replace(executor, "__call__", __call__)
    for name, record in (("create_masked_load", "loaded"), ("create_masked_store", "stored")):
        replace(interpreter.InterpreterBuilder, name, _recorded(getattr(interpreter.InterpreterBuilder, name), record))
    for name in ("create_atomic_rmw", "create_atomic_cas"):
        replace(interpreter.InterpreterBuilder, name, _atomic(getattr(interpreter.InterpreterBuilder, name)))


def _may_wait(kernel: Any, seen: frozenset[str] = frozenset()) -> bool:
    """Whether a kernel, or a function that it calls, has an operation by which programs wait for each other."""
    code = kernel.__code__
    # Names of keyword arguments are constants.
    keywords = (name for constant in code.co_consts if isinstance(constant, tuple) for name in constant)
    names = frozenset((*code.co_names, *(name for name in keywords if isinstance(name, str))))
    called = {name: getattr(kernel.__globals__.get(name), "fn", None) for name in names - seen}
    return bool(names & WAITS) or any(
        _may_wait(function, seen | names) for function in called.values() if hasattr(function, "__code__")
    )


def _once(kernel: Any, run: Callable[[dict[str, Any]], None]) -> Any:
    """A function that the interpreter takes for the kernel and calls for each program; it runs all at the first call."""
    pending = [True]

    def program(**arguments: object) -> None:
        if pending:
            pending.clear()
            run(arguments)

    # The interpreter looks up the modules of Triton in the function's globals.
    like = FunctionType(program.__code__, kernel.__globals__, kernel.__name__, None, program.__closure__)
    like.__annotations__ = kernel.__annotations__
    like.__signature__ = signature(kernel)  # type: ignore[attr-defined]
    return like


def _run(kernel: Any, arguments: dict[str, Any], builder: Any, *, waits: bool) -> None:
    grid: Index = builder.grid_dim

    def program(number: int) -> None:
        x, rest = divmod(number, grid[1] * grid[2])
        builder.set_grid_idx(x, *divmod(rest, grid[2]))
        if current.stores is not None:
            current.stores.begin_program()
        kernel(**arguments)

    total = math.prod(grid)
    began, ran = process_time(), total
    takes_turns = not waits and current.order is GridOrder.INTERLEAVED and 1 < total <= MOST_INTERLEAVED
    if takes_turns:
        current.turns = Turns()
        try:
            current.turns.run(functools.partial(program, number) for number in range(total))
        finally:
            current.turns = None
    elif current.stores is not None and not waits:
        ran = _run_sample(program, total, current.stores)
    else:
        for number in range(total) if waits else _ordered(total):
            program(number)
    if current.stores is not None:
        current.stores.end(kernel.__name__, ran, total, process_time() - began)


def _ordered(total: int) -> Sequence[int]:
    if current.order is GridOrder.USUAL:
        return range(total)
    if current.order is GridOrder.REVERSED:
        return range(total - 1, -1, -1)
    numbers = list(range(total))
    Random(current.seed).shuffle(numbers)
    return numbers


def _run_sample(program: Callable[[int], None], total: int, stores: Stores) -> int:
    """Run the programs of a grid of ``total`` in the current order, or as many as there is time for; returns their number."""
    order = _ordered(total)
    # In the usual order, the last programs may take longer than the first, as in attention with a causal mask.
    first = _ends(total) if current.order is GridOrder.USUAL else order[: 2 * ENDS]
    began = process_time()
    for number in first:
        program(number)
    each = (process_time() - began) / len(first)
    later: Iterable[int] = order
    is_long = each * total > current.whole_seconds and stores.may_be_complete(total)
    if is_long and not (current.must_compare and stores.has_atomics):
        count = max(FEWEST, int(current.seconds / each))
        random = Random(current.seed).sample(range(total), min(count, total))
        chosen = {*_ends(total), *_beside_powers(total), *random}
        is_sorted = isinstance(order, range)
        later = sorted(chosen, reverse=order[0] > 0) if is_sorted else [number for number in order if number in chosen]
    ran, done = len(first), set(first)
    for number in later:
        if number not in done:
            if not current.must_compare and process_time() - began > MOST_SECONDS:
                break
            program(number)
            ran += 1
    return ran


def _ends(total: int) -> Sequence[int]:
    return sorted({*range(min(ENDS, total)), *range(max(total - ENDS, 0), total)})


def _beside_powers(total: int) -> set[int]:
    """The powers of two and the numbers beside them: there kernels that split their work may change their behaviour."""
    powers = [1 << exponent for exponent in range(LEAST_POWER, total.bit_length())]
    return {number for power in powers for number in (power - 1, power, power + 1) if number < total}


def _recorded(original: Any, record: str) -> Any:
    def operation(self: Any, ptrs: Any, *rest: Any, **named: Any) -> Any:
        if current.turns is not None and record == "stored":
            index = self.grid_idx
            current.turns.pause()
            self.set_grid_idx(*index)
        if current.stores is not None:
            # The mask follows the values in a store, and the addresses in a load.
            mask = rest[1] if record == "stored" else rest[0]
            getattr(current.stores, record)(ptrs.data, mask.data)
        return original(self, ptrs, *rest, **named)

    return operation


def _atomic(original: Any) -> Any:
    def operation(self: Any, ptr: Any, *rest: Any) -> Any:
        if current.stores is not None:
            current.stores.has_atomics = True
        return original(self, ptr, *rest)

    return operation
