"""The connection of one command to a cluster."""

from __future__ import annotations

import contextlib
import logging
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Future, InvalidStateError
from typing import Any, Concatenate, ParamSpec, TypeVar

from distributed import Client, KilledWorker
from distributed.security import Security

from mtmc_lsp.app.bench.jobs import Place, WorkerLost
from mtmc_lsp.cluster.address import ClusterAddress
from mtmc_lsp.cluster.bundle import Bundle
from mtmc_lsp.cluster.local import local_cluster
from mtmc_lsp.cluster.machine import Software, software_of
from mtmc_lsp.cluster.plugin import RESOURCE, JobPlugin, run_job
from mtmc_lsp.core.errors import EnvironmentNotAble

P = ParamSpec("P")
T = TypeVar("T")
CONNECT_SECONDS = 5.0
WORKER_SECONDS = 20.0
"""How long to wait for a first worker of a cluster, or for all of a cluster on this machine."""
PACKAGE = "mtmc_lsp"


class ClusterJobs:
    """Jobs on the workers of one kind: those with the same GPU. A worker runs one job at a time."""

    is_remote, shares_gpus = True, False

    def __init__(self, client: Client, plugin: str, kind: str, address: str) -> None:
        """Prepare.

        Args:
            plugin: the name of the plugin that prepared the workers.
            kind: of their GPUs.
            address: the cluster as the user named it.
        """
        self._client, self._plugin, self._kind, self._address = client, plugin, kind, address

    @property
    def count(self) -> int:
        """How many workers of the kind there are now; at least 1, because a lost one may return."""
        return max(1, len(_workers(self._client, self._kind)))

    def submit(self, job: Callable[Concatenate[Place, P], T], *arguments: P.args, **options: P.kwargs) -> Future[T]:
        """As in :class:`~mtmc_lsp.app.bench.jobs.Jobs`. Dask repeats the job on another worker if its worker is lost."""
        resources = {RESOURCE + self._kind: 1}
        task = self._client.submit(run_job, self._plugin, job, arguments, options, resources=resources, pure=False)
        future: Future[T] = Future()

        # Not by Client.get_executor(): its futures fail if a worker is lost while its result is fetched.
        def fetch() -> None:
            with contextlib.suppress(InvalidStateError):
                try:
                    result = task.result()
                    # Dask would compute it again if its worker is lost later.
                    task.release()
                    future.set_result(result)
                except BaseException as error:
                    future.set_exception(error)

        future.add_done_callback(lambda done: task.cancel() if done.cancelled() else None)
        threading.Thread(target=fetch, daemon=True).start()
        return future

    def result(self, future: Future[T]) -> T:
        """As in :class:`~mtmc_lsp.app.bench.jobs.Jobs`.

        Raises:
            WorkerLost: as there.
            EnvironmentNotAble: the cluster is gone.
        """
        try:
            return future.result()
        except KilledWorker as error:
            count = error.allowed_failures + 1
            raise WorkerLost(f"the workers that ran it were lost {count} times, so the cluster gave it up") from None
        except CancelledError:
            raise EnvironmentNotAble(
                f"the connection to the cluster {self._address} was lost",
                remedy="Results until then are stored. Run the command again to go on.",
            ) from None


class Session:
    """A command's connection to a cluster whose workers are prepared."""

    def __init__(self, client: Client, plugin: str, software: Software, address: ClusterAddress) -> None:
        """Take over a connection.

        Args:
            plugin: the name of the plugin that prepared the workers.
            software: that of this machine, and of all workers.
        """
        self._client, self._plugin, self._address = client, plugin, address
        self.software = software
        self.dashboard = str(client.dashboard_link)
        """The address of the cluster's pages."""

    @property
    def kinds(self) -> dict[str, int]:
        """The kinds of GPUs that the cluster has, and how many workers have each."""
        kinds = {
            name.removeprefix(RESOURCE) for worker in _all_workers(self._client).values() for name in _kinds(worker)
        }
        return {kind: len(_workers(self._client, kind)) for kind in sorted(kinds)}

    def jobs(self, kind: str) -> ClusterJobs:
        """Jobs on the workers of a kind."""
        return ClusterJobs(self._client, self._plugin, kind, self._address.text)


@contextlib.contextmanager
def connect(
    address: ClusterAddress,
    bundle: Bundle,
    python: str,
    *,
    on_lost: Callable[[str], None] = lambda worker: None,
    forks: bool = True,
) -> Iterator[Session]:
    """Connect to a cluster, or start one on this machine, and prepare its workers.

    Args:
        bundle: the user's files that jobs need.
        python: the interpreter for user code.
        on_lost: called with the address of each worker that was lost with a job.
        forks: whether workers keep a fork server that has imported torch.

    Raises:
        EnvironmentNotAble: the cluster does not answer, has no workers, or other software than this machine.
    """
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    software = software_of(python)
    with contextlib.ExitStack() as stack:
        if address.is_local:
            cluster = stack.enter_context(local_cluster(address))
            client = stack.enter_context(_client(cluster, address))
            _wait_for_workers(client, address, len(cluster.worker_spec))
        else:
            client = stack.enter_context(_client(address.text, address))
            _wait_for_workers(client, address, 1)
        _check_installed(client, address)
        plugin = JobPlugin(f"mtmc-{uuid.uuid4().hex[:12]}", bundle, software, python, forks=forks)
        stack.callback(_unregister, client, plugin.name)
        client.register_plugin(plugin, name=plugin.name)
        client.subscribe_topic("all", lambda event: _report_lost(event, on_lost))
        stack.callback(client.unsubscribe_topic, "all")
        yield Session(client, plugin.name, software, address)


def _client(target: Any, address: ClusterAddress) -> Client:
    """A client of a cluster.

    Raises:
        EnvironmentNotAble: it does not answer, or TLS is not configured.
    """
    is_encrypted = address.text.startswith("tls://")
    if is_encrypted and not Security().tls_ca_file:
        raise EnvironmentNotAble(
            f"{address.text} needs Dask's TLS files, and none are configured",
            remedy="Set distributed.comm.tls in Dask's configuration, as in docs/cluster.md.",
        )
    try:
        return Client(target, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, ValueError) as error:
        raise EnvironmentNotAble(
            f"the cluster {address.text} does not answer: {str(error).splitlines()[0]}",
            remedy="Check the address, and that its scheduler runs: dask scheduler.",
        ) from None


def _wait_for_workers(client: Client, address: ClusterAddress, count: int) -> None:
    try:
        client.wait_for_workers(count, timeout=WORKER_SECONDS)
    except TimeoutError:
        raise EnvironmentNotAble(
            f"the cluster {address.text} has {len(_all_workers(client))} workers after {WORKER_SECONDS:.0f} s",
            remedy=f"Start one for each GPU: dask worker {address.text} --nthreads 1.",
        ) from None


def _check_installed(client: Client, address: ClusterAddress) -> None:
    """Refuse a cluster without this tool: Dask could not load what is sent.

    Raises:
        EnvironmentNotAble: a worker or the scheduler lacks it.
    """
    known = client.get_versions(packages=[PACKAGE])
    places = {"scheduler": known["scheduler"], **{f"worker {name}": item for name, item in known["workers"].items()}}
    lacking = [name for name, item in places.items() if not item or not item["packages"].get(PACKAGE)]
    if lacking:
        raise EnvironmentNotAble(
            f"the {lacking[0]} of the cluster {address.text} does not have mtmc-lsp",
            remedy="Run there: pip install 'mtmc-lsp[cluster]'",
        )


def _unregister(client: Client, plugin: str) -> None:
    # The cluster may be gone.
    with contextlib.suppress(Exception):
        client.unregister_worker_plugin(plugin)


def _report_lost(event: tuple[float, Mapping[str, Any]], on_lost: Callable[[str], None]) -> None:
    message = event[1]
    if message.get("action") == "remove-worker" and not message.get("expected") and message.get("processing-tasks"):
        on_lost(str(message["worker"]))


def _all_workers(client: Client) -> Mapping[str, Mapping[str, Any]]:
    workers: Mapping[str, Mapping[str, Any]] = client.scheduler_info()["workers"]
    return workers


def _workers(client: Client, kind: str) -> list[str]:
    """Addresses of the workers of a kind."""
    return [name for name, worker in _all_workers(client).items() if RESOURCE + kind in _kinds(worker)]


def _kinds(worker: Mapping[str, Any]) -> list[str]:
    return [name for name in worker["resources"] if name.startswith(RESOURCE)]
