"""What runs in a Dask worker: it prepares the worker for one command, and runs the command's jobs.

User code runs in the processes that a job starts, never in the worker itself. Dask calls :class:`JobPlugin` on all workers, also
on those that come later, so a worker gets jobs only after its software was compared and the user's files are there.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import dask
from distributed import Status, Worker, get_worker
from distributed.diagnostics.plugin import WorkerPlugin

from mtmc_lsp.app.bench.jobs import Place
from mtmc_lsp.app.bench.processes import Processes, Slot
from mtmc_lsp.cluster.bundle import Bundle, unpack
from mtmc_lsp.cluster.machine import Hardware, Software, hardware, software_of, usable_python
from mtmc_lsp.core.errors import EnvironmentNotAble
from mtmc_lsp.process.fork_server import ForkServer, likely_variables

T = TypeVar("T")
BUNDLES = "mtmc-bundles"
"""The folder of unpacked bundles, in Dask's folder for temporary files of all workers of a host."""
RESOURCE = "mtmc "
"""A worker has 1 of the resource that is called so, followed by the kind of its GPU; each job takes it whole."""
HASH_SEED = "6640"
"""Dask starts workers with this ``PYTHONHASHSEED``."""


class JobPlugin(WorkerPlugin):  # type: ignore[misc]
    """Prepares a worker, and runs one job of a command at a time."""

    def __init__(self, name: str, bundle: Bundle, software: Software, python: str, *, forks: bool = True) -> None:
        """Describe the command.

        Args:
            name: of the plugin, different for each command.
            bundle: the user's files.
            software: that of the user's machine.
            python: the interpreter on the user's machine.
            forks: whether workers keep a fork server that has imported torch.
        """
        self.name = name
        self._bundle, self._software, self._python, self._forks = bundle, software, python, forks
        self._fork_server: ForkServer | None = None
        self._processes: Processes | None = None
        self._place: Place | None = None
        self._key = ""

    async def setup(self, worker: Worker) -> None:
        """Compare the software, unpack the files, and offer the worker's GPU to jobs.

        Raises:
            EnvironmentNotAble: results of this worker would not compare with those of the user's machine.
        """
        used = await asyncio.to_thread(self._prepare, worker)
        resource = RESOURCE + used.kind
        if resource not in worker.state.total_resources:
            await worker.set_resources(**{resource: 1})
            # Jobs whose workers were all lost wait for a worker. Dask gives them to one that starts or resumes, but a new worker
            # did not have the resource when it started.
            worker.status = Status.paused
            worker.status = Status.running

    def _prepare(self, worker: Worker) -> Hardware:
        _remove_variables_of_dask()
        python = usable_python(self._python, sys.executable)
        difference = self._software.difference(software_of(python))
        if difference:
            raise EnvironmentNotAble(
                f"the worker {worker.address} has {difference}",
                remedy=f"Install the same versions for {python} there, or end this worker.",
            )
        bundles = Path(worker.local_directory).parent / BUNDLES
        unpack(self._bundle, bundles)
        used = hardware()
        if self._forks:
            self._fork_server = ForkServer(python, likely_variables(), preload=True)
        devices = [used.device] if used.device else []
        self._processes = Processes(1, devices, self._fork_server)
        slot = Slot(used.device, used.cores)
        self._place = Place(self._processes, slot, python, self._bundle.copies(bundles), is_remote=True)
        return used

    async def teardown(self, worker: Worker) -> None:
        """End the processes of the command."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        if self._processes is not None:
            self._processes.stop()
            self._processes.close_conversation()
        if self._fork_server is not None:
            self._fork_server.close()

    def transition(self, key: Any, start: Any, finish: Any, **options: Any) -> None:
        """End the process of a job that nobody waits for any more, because it was cancelled or the command ended."""
        if (start, finish) == ("executing", "released") and key == self._key and self._processes is not None:
            threading.Thread(target=self._processes.stop, daemon=True).start()

    def run(self, job: Callable[[Place], T], key: str) -> T:
        """Run a job in the thread of its task."""
        assert self._place is not None, "a worker without a place has no resource for jobs"
        self._key = key
        try:
            return job(self._place)
        finally:
            self._key = ""


def run_job(plugin: str, job: Callable[..., T], arguments: tuple[Any, ...], options: dict[str, Any]) -> T:
    """The task that the cluster runs for a job: call it with the place that the plugin prepared."""
    worker = get_worker()
    prepared = cast(JobPlugin, worker.plugins[plugin])
    return prepared.run(lambda place: job(place, *arguments, **options), str(worker.get_current_task()))


def _remove_variables_of_dask() -> None:
    """Remove the environment variables that Dask sets for its workers, such as OMP_NUM_THREADS: user code runs as elsewhere."""
    variables = dask.config.get("distributed.nanny.pre-spawn-environ", None) or {}
    for name, value in {**variables, "PYTHONHASHSEED": HASH_SEED}.items():
        if os.environ.get(name) == str(value):
            del os.environ[name]
