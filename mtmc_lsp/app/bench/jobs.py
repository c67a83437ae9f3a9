"""Jobs: each runs a process for one problem, on this machine or on a worker of a cluster.

A job is a function that gets the :class:`Place` where it runs. On a worker, the user's files are copies in other folders: a job
translates the paths of its request with :meth:`Place.here`, and those of its result with :meth:`Place.there`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from mtmc_lsp.app.bench.processes import Processes, Slot
from mtmc_lsp.process.fork_server import ForkServer
from mtmc_lsp.process.isolation import isolated_command

P = ParamSpec("P")
T = TypeVar("T")
Program = str | tuple[str, ...]
"""What a process runs: a module of this package, or a command line. The file of its answer is added as the last argument."""


class WorkerLost(Exception):
    """The workers of a cluster that ran a job ended during it, more often than the cluster repeats a job."""


@dataclass(frozen=True)
class Place:
    """Where a job runs."""

    processes: Processes
    slot: Slot
    python: str = ""
    """The interpreter for the user's code; empty on the user's machine, where the request names it."""
    folders: Mapping[str, str] = field(default_factory=dict)
    """Folders of the user's machine, and their copies on this worker; empty on the user's machine."""
    is_remote: bool = False
    """Whether the job runs on a worker of a cluster."""

    def here(self, path: str) -> str:
        """The copy of a file of the user's machine; a path that has no copy stays as it is."""
        return _with_folders(path, self.folders)

    def there(self, value: Any) -> Any:
        """JSON data with the paths of the user's machine instead of those of the copies."""
        return _renamed(value, {copy: folder for folder, copy in self.folders.items()})

    def moved(self, value: Any) -> Any:
        """JSON data with the paths of the copies instead of those of the user's machine."""
        return _renamed(value, self.folders)

    def answer(self, program: Program, request: object, seconds: float) -> dict[str, Any]:
        """The answer of a process. Errors are those of :meth:`~mtmc_lsp.app.bench.processes.Processes.answer`."""
        command = isolated_command(program) if isinstance(program, str) else program
        return self.processes.answer(command, request, self.slot, seconds)

    def ask(
        self, program: Program, key: str, opening: object, command: str, data: object, seconds: float
    ) -> dict[str, Any]:
        """The answer of a process that stays open. Errors are those of :meth:`~mtmc_lsp.app.bench.processes.Processes.ask`."""
        line = isolated_command(program) if isinstance(program, str) else program
        return self.processes.ask(line, key, opening, command, data, self.slot, seconds)


def _with_folders(path: str, folders: Mapping[str, str]) -> str:
    # The innermost folder first.
    for folder in sorted(folders, key=len, reverse=True):
        if path == folder or path.startswith(f"{folder}/"):
            return folders[folder] + path[len(folder) :]
    return path


def _renamed(value: Any, folders: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {name: _renamed(item, folders) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_renamed(item, folders) for item in value]
    if isinstance(value, str):
        for old, new in folders.items():
            value = value.replace(old, new)
    return value


class Jobs(Protocol):
    """Runs jobs, several at a time."""

    is_remote: bool
    """Whether jobs run on the workers of a cluster, so that they return what they store."""
    shares_gpus: bool
    """Whether several jobs use a GPU at the same time."""

    @property
    def count(self) -> int:
        """How many jobs run at the same time."""

    def submit(self, job: Callable[Concatenate[Place, P], T], *arguments: P.args, **options: P.kwargs) -> Future[T]:
        """Start a job as soon as a place is free. Submit at most :attr:`count` jobs at a time."""

    def result(self, future: Future[T]) -> T:
        """The result of a job that :meth:`submit` started, when it is done.

        Raises:
            WorkerLost: the workers that ran it were lost.
        """


class LocalJobs:
    """Runs jobs on this machine. The GPUs and the CPU cores are shared evenly."""

    is_remote = False

    def __init__(self, count: int = 1, devices: Sequence[str] = (), fork_server: ForkServer | None = None) -> None:
        """Prepare.

        Args:
            count: how many jobs run at the same time.
            devices: the GPUs that jobs run on; empty without a GPU.
            fork_server: starts the workers of all jobs; the caller closes it.
        """
        self.count = max(1, count)
        self.shares_gpus = self.count > 1 and bool(devices)
        self._processes = Processes(self.count, devices, fork_server)
        self._pool = ThreadPoolExecutor(self.count)

    def __enter__(self) -> LocalJobs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def submit(self, job: Callable[Concatenate[Place, P], T], *arguments: P.args, **options: P.kwargs) -> Future[T]:
        """As in :class:`Jobs`."""

        def run() -> T:
            with self._processes.slot() as slot:
                return job(Place(self._processes, slot), *arguments, **options)

        return self._pool.submit(run)

    def result(self, future: Future[T]) -> T:
        """As in :class:`Jobs`."""
        return future.result()

    def close(self) -> None:
        """End all processes that run, and start no further ones."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._processes.stop()
