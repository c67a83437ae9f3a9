"""Opens the cluster that ``--cluster`` names, for commands."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from mtmc_lsp.app.bench.suite import Problem
from mtmc_lsp.cluster.address import parse_cluster
from mtmc_lsp.cluster.imports import bundle_of
from mtmc_lsp.core.errors import EnvironmentNotAble
from mtmc_lsp.core.settings import Settings

if TYPE_CHECKING:
    from mtmc_lsp.cluster.session import Session

T = TypeVar("T")


@contextlib.contextmanager
def open_cluster(text: str, problems: Sequence[Problem], settings: Settings, python: str) -> Iterator[Session]:
    """Connect to the cluster that ``--cluster`` names, send it the files of the problems, and print a line about it.

    Raises:
        RequestError: the address has another form.
        EnvironmentNotAble: ``distributed`` is not installed, or the cluster cannot be used.
    """
    address = parse_cluster(text)
    try:
        from mtmc_lsp.cluster.session import connect
    except ModuleNotFoundError as error:
        if error.name not in ("dask", "distributed"):
            raise
        raise EnvironmentNotAble(
            "--cluster needs the package distributed", remedy="Run: pip install 'mtmc-lsp[cluster]'"
        ) from None
    with connect(address, bundle_of(problems, settings), python, on_lost=_show_lost) as session:
        workers = ", ".join(f"{count} x {kind}" for kind, count in session.kinds.items())
        print(f"cluster {text}: {workers}; dashboard {session.dashboard}", file=sys.stderr)
        yield session


def _show_lost(worker: str) -> None:
    print(f"the worker {worker} was lost; its work runs again on another worker", file=sys.stderr)


def merge(iterators: Mapping[str, Iterator[T]]) -> Iterator[tuple[str, T]]:
    """Run several iterators at the same time, and yield their items with their names as they come."""
    if len(iterators) == 1:
        [(name, only)] = iterators.items()
        yield from ((name, item) for item in only)
        return
    items: queue.SimpleQueue[tuple[str, T] | BaseException | None] = queue.SimpleQueue()

    def run(name: str, iterator: Iterator[T]) -> None:
        try:
            for item in iterator:
                items.put((name, item))
        except BaseException as error:
            items.put(error)
        else:
            items.put(None)

    for name, iterator in iterators.items():
        threading.Thread(target=run, args=(name, iterator), daemon=True).start()
    running = len(iterators)
    while running:
        item = items.get()
        if isinstance(item, BaseException):
            raise item
        if item is None:
            running -= 1
        else:
            yield item
