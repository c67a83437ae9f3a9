"""Fakes of what services on workers run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from mtmc_lsp.app.bench.jobs import Place
from mtmc_lsp.app.bench.processes import Processes, Slot
from mtmc_lsp.core.json_codec import to_json

OPENING = """
import contextlib, json, os, sys, time
from mtmc_lsp.app.bench.conversation import converse
from mtmc_lsp.core.errors import RequestError, WorkerFailed, Location

@contextlib.contextmanager
def prepare(opening):
    yield lambda command, data: answer(opening, command, data)
"""


def program(answer: str) -> tuple[str, ...]:
    """A service whose function ``answer(opening, command, data)`` is given as source."""
    return (sys.executable, "-c", f"{OPENING}\n{answer}\nconverse(prepare)\n")


@contextmanager
def worker() -> Iterator[Place]:
    """A worker of a cluster with one slot."""
    processes = Processes(1)
    try:
        yield Place(processes, Slot("", ()), is_remote=True)
    finally:
        processes.stop()
        processes.close_conversation()


class FakeJobs:
    """Workers in threads of this process. Requests to services are answered by a function."""

    is_remote, shares_gpus = True, False

    def __init__(self, count: int, answer: Callable[[int, str, Any], Any]) -> None:
        """Prepare.

        Args:
            answer: gets the number of the worker, the command and its data; gives the answer to the request.
        """
        self.count, self._answer = count, answer
        self._pools = [ThreadPoolExecutor(1) for _ in range(count)]
        self._next = 0

    def submit(self, job: Callable[..., Any], *arguments: Any) -> Future[Any]:
        number, self._next = self._next, (self._next + 1) % self.count
        _, _, command, data, _ = arguments
        return self._pools[number].submit(self._answered, number, command, data)

    def _answered(self, number: int, command: str, data: Any) -> Any:
        return {"result": to_json(self._answer(number, command, data))}

    def result(self, future: Future[Any]) -> Any:
        return future.result()

    def close(self) -> None:
        """End the threads."""
        for pool in self._pools:
            pool.shutdown()
