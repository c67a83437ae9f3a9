"""Captures a target in a worker: as a whole, or else its regions."""

from __future__ import annotations

from functools import partial

from mtmc_lsp.app.regions.runs import with_notes, worthwhile
from mtmc_lsp.app.target_file import OpenTarget
from mtmc_lsp.capture.client import find_regions, find_workload, run_capture
from mtmc_lsp.capture.recorded_calls import RECORDS
from mtmc_lsp.capture.regions.search import no_region
from mtmc_lsp.core.errors import MtmcError
from mtmc_lsp.core.workload import Capture, Workload
from mtmc_lsp.process.fork_server import ForkServer
from mtmc_lsp.process.project_files import FOLDER
from mtmc_lsp.process.worker_process import Worker
from mtmc_lsp.source.targets import find_target


def workload_of(target: OpenTarget) -> Workload:
    """The workload of the whole target.

    Raises:
        MtmcError: it has none, or is a kernel.
    """
    path, plain = str(target.path), target.plain
    definition = find_target(plain, path, target.qualname)
    return find_workload(path, plain, definition, target.project / FOLDER / RECORDS)


def capture_whole(target: OpenTarget, fork_server: ForkServer | None, seconds: float) -> Capture:
    """The graph of the whole target.

    Raises:
        MtmcError: it has no workload, raises, or cannot be exported as a graph.
    """
    workload = workload_of(target)
    with _open_worker(target, fork_server) as worker:
        return run_capture(workload, target.plain, worker, seconds)


def capture_regions(
    target: OpenTarget, fork_server: ForkServer | None, seconds: float, error: MtmcError
) -> tuple[Capture, ...]:
    """The graphs of the regions of a target, the largest first.

    Args:
        error: why the whole target cannot be captured.

    Raises:
        MtmcError: no region is left; the message names each line that cuts the target.
    """
    workload = workload_of(target)
    regions = find_regions(workload, target.plain, partial(_open_worker, target, fork_server), seconds)
    regions = worthwhile(regions, target.settings)
    if not regions.captures:
        raise no_region(workload, regions, error) from error
    return with_notes(regions)


def _open_worker(target: OpenTarget, fork_server: ForkServer | None) -> Worker:
    variables = fork_server.env if fork_server is not None else {}
    return Worker(target.python, cwd=str(target.project), env=variables, fork_server=fork_server)
