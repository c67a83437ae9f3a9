"""A cluster on this machine for one command: one worker process for each GPU, or as many as named without a GPU."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

import dask
from distributed import Nanny, Scheduler, Security, SpecCluster

from mtmc_lsp.app.bench.runner import visible_devices
from mtmc_lsp.cluster.address import ClusterAddress
from mtmc_lsp.cluster.machine import SLOT
from mtmc_lsp.core.errors import RequestError
from mtmc_lsp.process.priority import usable_cores

HOST = "127.0.0.1"
CORES_PER_WORKER = 2
"""Cores for each worker without a GPU, unless their number is named."""
SETTINGS = {
    # The workers' interpreters do not import modules from the user's working folder.
    "distributed.nanny.pre-spawn-environ": {"PYTHONSAFEPATH": "1"} if sys.version_info >= (3, 11) else {},
    # How many workers of a job may be lost before the job is given up.
    "distributed.scheduler.allowed-failures": 10,
    # Dask ends a worker for good that is away at this time after it was lost, although its nanny restarts it.
    "distributed.deploy.lost-worker-timeout": "365 days",
}


@contextlib.contextmanager
def local_cluster(address: ClusterAddress) -> Iterator[SpecCluster]:
    """A cluster that ends with the context.

    Raises:
        RequestError: more workers are named than there are GPUs.
    """
    environments = worker_environments(address.workers, visible_devices())
    # Other users of this machine could send it jobs; Dask makes temporary keys if it can.
    security = Security.temporary() if importlib.util.find_spec("cryptography") else None
    common: dict[str, Any] = {"host": HOST, "security": security}
    worker = {"nthreads": 1, "memory_limit": 0, "silence_logs": logging.CRITICAL, "dashboard": False}
    nanny = {**worker, "preload": ["mtmc_lsp.cluster.preload"], **common}
    scheduler = {"dashboard": True, "dashboard_address": f"{HOST}:0", "port": 0, **common}
    with (
        restored_environment(),
        dask.config.set(SETTINGS),
        SpecCluster(
            scheduler={"cls": Scheduler, "options": scheduler},
            workers={
                number: {"cls": Nanny, "options": {**nanny, "env": environment}}
                for number, environment in enumerate(environments)
            },
            security=security,
            silence_logs=logging.CRITICAL,
        ) as cluster,
    ):
        yield cluster


@contextlib.contextmanager
def restored_environment() -> Iterator[None]:
    """Restore this process's environment variables: Dask sets those of the workers to spawn, and PYTHONHASHSEED, in it."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


def worker_environments(named: int | None, devices: list[str]) -> list[dict[str, str]]:
    """The environment variables of each worker.

    Args:
        named: how many workers the user wants; None for all that make sense.

    Raises:
        RequestError: there are fewer GPUs.
    """
    if devices:
        if named is not None and named > len(devices):
            raise RequestError(
                f"--cluster local:{named} needs {named} GPUs, and this machine has {len(devices)}",
                remedy="Write --cluster local for one worker per GPU.",
            )
        return [{"CUDA_VISIBLE_DEVICES": device} for device in devices[:named]]
    count = named or max(1, len(usable_cores()) // CORES_PER_WORKER)
    return [{SLOT: f"{number}/{count}"} for number in range(count)]
