"""Runs the programs of a launch in turns, so that a lost update shows. Runs in workers.

Two programs that load, add and store without atomic operations are right in any order one after the other, but not side by side.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable


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
            self._run_program()
        except BaseException as error:  # it is raised again in the thread of the launch
            self.error = error
        self.is_done = True
        self._turns.back.release()


class Turns:
    """Lets programs run in turns that end at :meth:`pause`."""

    def __init__(self) -> None:
        self.back = threading.Semaphore(0)
        self._current: _Program | None = None

    def run(self, programs: Iterable[Callable[[], None]]) -> None:
        """Run all programs to their ends."""
        waiting = deque(_Program(run, self) for run in programs)
        for program in waiting:
            program.start()
        error: BaseException | None = None
        while waiting:
            self._current = program = waiting.popleft()
            program.may_go.release()
            self.back.acquire()
            error = error or program.error
            if not program.is_done:
                waiting.append(program)
        if error is not None:
            raise error

    def pause(self) -> None:
        """End the turn of the current program, until all others had theirs."""
        program = self._current
        assert program is not None
        self.back.release()
        program.may_go.acquire()
