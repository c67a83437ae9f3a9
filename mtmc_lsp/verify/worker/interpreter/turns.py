"""Runs the programs of a launch in turns, so that a lost update shows. Runs in workers.

Two programs that load, add and store without atomic operations are right in any order one after the other, but not side by side.
A program that waits for another one, for example for a lock, lets the others continue.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from random import Random
from types import CodeType
from typing import Any

from mtmc_lsp.verify.messages import GridOrder

MOST_IDLE_ROUNDS = 300
"""So many rounds in which no program ends or changes memory are a deadlock."""
DEADLOCK = "the programs of the launch wait for each other forever"
WAITS = frozenset(("atomic_cas", "atomic_xchg", "atomic_poll", "volatile"))
"""Names of operations and arguments by which a program may wait for another one, which would then have to run before it."""
ATOMIC, WHILE = "atomic_", "while"
"""How names of atomic operations begin, and the mark of a ``while`` loop: there a program may wait by any of them."""


class _Stopped(BaseException):
    """Ends a program whose launch failed."""


class _Program(threading.Thread):
    """A program of a grid; only the one whose turn it is runs."""

    def __init__(self, run: Callable[[], None], turns: Turns) -> None:
        super().__init__(daemon=True)
        self._run_program, self._turns = run, turns
        self.may_go = threading.Semaphore(0)
        self.error: BaseException | None = None
        self.is_done = False

    def run(self) -> None:
        self.may_go.acquire()
        try:
            self._turns.check()
            self._run_program()
        except BaseException as error:  # it is raised again in the thread of the launch
            self.error = error
        self.is_done = True
        self._turns.back.release()


class Turns:
    """Lets programs run in turns that end at :meth:`pause`."""

    def __init__(self, most: int, order: GridOrder = GridOrder.INTERLEAVED, seed: int = 0) -> None:
        """Set how the turns follow each other.

        Args:
            most: how many programs take turns; the next one begins when one ends.
            order: of the turns in a round: the programs' order, reversed, or (shuffled) by chance, so that some programs have
                several turns and others none.
            seed: of chance.
        """
        self.back = threading.Semaphore(0)
        self._most, self._order, self._random = most, order, Random(seed)
        self._current: _Program | None = None
        self._is_atomic, self._is_stopping = False, False
        self._idle_rounds = 0

    def run(self, programs: Iterable[Callable[[], None]]) -> None:
        """Run all programs to their ends.

        Raises:
            RuntimeError: all programs wait.
        """
        pending = iter(programs)
        running: list[_Program] = []
        error: BaseException | None = None
        while True:
            for run in itertools.islice(pending, self._most - len(running)):
                running.append(_Program(run, self))
                running[-1].start()
            if not running:
                break
            self._idle_rounds += 1
            for program in self._round(running):
                if not program.is_done:
                    self._turn(program)
                    error = error or program.error
            if any(program.is_done for program in running):
                self.note_progress()
            running = [program for program in running if not program.is_done]
            if self._idle_rounds > MOST_IDLE_ROUNDS:
                self._stop(running)
                error = error or RuntimeError(DEADLOCK)
                break
        if error is not None:
            raise error

    def pause(self) -> None:
        """End the turn of the current program, until all others had theirs; not within an atomic operation."""
        program = self._current
        assert program is not None
        self.check()
        if self._is_atomic:
            return
        self.back.release()
        program.may_go.acquire()
        self.check()

    def check(self) -> None:
        """End the current program if the launch has failed."""
        if self._is_stopping:
            raise _Stopped

    def note_progress(self) -> None:
        """Note that the current program did more than wait."""
        self._idle_rounds = 0

    @contextlib.contextmanager
    def atomic(self) -> Iterator[None]:
        """An operation of the current program in which its turn does not end."""
        self._is_atomic = True
        try:
            yield
        finally:
            self._is_atomic = False

    def _round(self, running: list[_Program]) -> list[_Program]:
        if self._order is GridOrder.REVERSED:
            return running[::-1]
        if self._order is GridOrder.SHUFFLED:
            return self._random.choices(running, k=len(running))
        return list(running)

    def _turn(self, program: _Program) -> None:
        self._current = program
        program.may_go.release()
        self.back.acquire()

    def _stop(self, running: Iterable[_Program]) -> None:
        self._is_stopping = True
        for program in running:
            # It pauses, or has had no turn yet.
            self._turn(program)
            program.join()


@functools.lru_cache(maxsize=64)
def may_wait(kernel: Any) -> bool:
    """Whether a kernel, or a function that it calls, has an operation by which programs wait for each other."""
    names = _names(kernel, frozenset())
    return bool(names & WAITS) or (WHILE in names and any(name.startswith(ATOMIC) for name in names))


def _names(kernel: Any, seen: frozenset[str]) -> frozenset[str]:
    """The names in a kernel and in the functions that it calls, and :data:`WHILE` if they have such a loop."""
    code = kernel.__code__
    # Names of keyword arguments are constants.
    keywords = (name for constant in code.co_consts if isinstance(constant, tuple) for name in constant)
    names = frozenset((*code.co_names, *(name for name in keywords if isinstance(name, str))))
    names |= {WHILE} if has_while(code) else set()
    called = (getattr(kernel.__globals__.get(name), "fn", None) for name in names - seen)
    functions = [function for function in called if hasattr(function, "__code__")]
    return names.union(*(_names(function, seen | names) for function in functions))


def has_while(code: CodeType) -> bool:
    """Whether some jump goes back, but not to the next element of a ``for`` loop."""
    jumps = {*dis.hasjrel, *dis.hasjabs}
    steps = list(dis.get_instructions(code))
    targets = {step.argval for step in steps if step.opcode in jumps and step.argval <= step.offset}
    # A far jump goes to the prefix of its target.
    operations = iter([step for step in steps if step.opname != "EXTENDED_ARG"])
    operation, reached = next(operations), list[str]()
    for target in sorted(targets):
        while operation.offset < target:
            operation = next(operations)
        reached.append(operation.opname)
    return any(name != "FOR_ITER" for name in reached)
