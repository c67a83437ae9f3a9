"""Opens the cluster that ``--cluster`` names, for commands."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from mtmc_lsp.app.bench.suite import Problem
from mtmc_lsp.app.remote.messages import Opening
from mtmc_lsp.app.remote.target import SERVICE, RemoteTarget
from mtmc_lsp.app.target_file import OpenTarget
from mtmc_lsp.cluster.address import parse_cluster
from mtmc_lsp.cluster.imports import bundle_of
from mtmc_lsp.core.errors import EnvironmentNotAble, RequestError
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


@contextlib.contextmanager
def open_remote(
    text: str, target: OpenTarget, *, needs_sandbox: bool = False, fresh: bool = False, program: str = SERVICE
) -> Iterator[RemoteTarget]:
    """The workers of a cluster for one target, each with a service that measures its versions.

    Args:
        text: the cluster that ``--cluster`` names.
        needs_sandbox: whether to refuse if candidates cannot run in a sandbox.
        fresh: whether to ignore cached timings.
        program: the module of the service.

    Raises:
        RequestError: the cluster has several kinds of GPUs.
        EnvironmentNotAble: as for :func:`open_cluster`.
    """
    problem = Problem(target.qualname, target.path, target.project, "", target.qualname)
    with open_cluster(text, [problem], target.settings, target.python) as session:
        kinds = session.kinds
        if len(kinds) > 1:
            names = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
            raise RequestError(
                f"the cluster {text} has several kinds of GPUs ({names}), and the times of a run are those of one kind",
                remedy="Start a cluster whose workers have the same GPU.",
            )
        opening = Opening(str(target.path), target.qualname, target.python, target.settings, needs_sandbox, fresh=fresh)
        yield RemoteTarget(session.jobs(next(iter(kinds))), opening, program)


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
