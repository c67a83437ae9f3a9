"""The static checks that need a compiler: on save, compiles the file's kernels for the configured architectures.

It needs no GPU. A worker imports the modules that the kernels use, so the check only runs in trusted folders, and never asks
for trust. Its findings are valid until the text changes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mtmc_lsp.compile.messages import CompileRequest
from mtmc_lsp.compile.occupancy import SHARED_LIMIT
from mtmc_lsp.core.errors import MtmcError
from mtmc_lsp.core.results import KernelReport
from mtmc_lsp.core.settings import read_settings
from mtmc_lsp.server.features.resource_findings import described, resource_findings
from mtmc_lsp.server.server import Server
from mtmc_lsp.server.text import Document
from mtmc_lsp.source.lint import remove_ignored
from mtmc_lsp.source.lint.finding import Finding, Severity

if TYPE_CHECKING:
    from mtmc_lsp.process.worker_process import Worker
    from mtmc_lsp.source.triton.launch_sites import LaunchForm

log = logging.getLogger(__name__)
CODE = "shared-memory"
COMPILE_SECONDS = 60.0
"""Timeout for all kernels of one file."""
IDLE_SECONDS = 60.0
"""Idle time before the worker is stopped; it is reused because importing torch takes seconds."""
MAX_CACHED_REPORTS = 4000
"""Maximum number of cached compilation reports."""


def register(server: Server) -> None:
    """Check files when they are saved."""
    checks = CompileChecks(server)
    server.save_listeners.append(checks.saved)
    server.close_listeners.append(lambda _: checks.close())


class CompileChecks:
    """Compiles saved files, one at a time."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._lock = asyncio.Lock()
        self._worker: Worker | None = None
        self._worker_key: tuple[str, Path] | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._reports: dict[tuple[str, str, str], KernelReport] = {}
        """Reports by source of the kernels, launch and architecture."""

    def saved(self, document: Document) -> None:
        """Check a saved file in the background."""
        if document.outline.kernels and self._server.trusts(document.path):
            self._server.background(self._check(document))

    def close(self) -> None:
        """Stop the worker."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        if self._worker is not None:
            self._worker.kill()

    async def _check(self, document: Document) -> None:
        # Imported lazily, because the server must start fast.
        from mtmc_lsp.kernels.reading import OperationKind, read_kernels
        from mtmc_lsp.source.triton.launch_sites import launch_forms
        from mtmc_lsp.source.triton.standalone_kernels import standalone_kernels

        text = document.text.data
        client_settings = await self._server.settings_of(document.uri)
        forms = launch_forms(document.outline, document.path)
        try:
            settings = read_settings(Path(document.path).parent)
            archs = [arch for arch in client_settings.archs or settings.archs if arch in SHARED_LIMIT]
            kernels = standalone_kernels(document.outline)
            async with self._lock:
                if forms and document.text.data is text:
                    await self._compile(document, kernels, forms, archs, client_settings.python)
        except MtmcError as error:
            # Only log the error: the user did not request this check, and a run reports it.
            log.info("%s was not compiled: %s", document.path, error)
            return
        forms_by_location: dict[tuple[int, int], list[tuple[LaunchForm, list[KernelReport]]]] = {}
        for form in forms:
            reports = [
                self._reports[key] for arch in archs if (key := (kernels, repr(form.launch), arch)) in self._reports
            ]
            forms_by_location.setdefault((form.start, form.end), []).append((form, reports))
        kernels_read = read_kernels(document.path, text)
        products = {
            kernel.name
            for kernel in kernels_read
            if any(item.kind is OperationKind.PRODUCT for item in kernel.operations)
        }
        findings: list[Finding] = []
        for location_forms in forms_by_location.values():
            oversized = finding_at(location_forms)
            findings += [oversized] if oversized is not None else resource_findings(location_forms, products)
        if document.text.data is text:
            document.on_save = (text, remove_ignored(text, findings))
            self._server.refresh(document.uri)

    async def _compile(
        self,
        document: Document,
        kernels: str,
        forms: Sequence[LaunchForm],
        archs: Sequence[str],
        python: str | None,
    ) -> None:
        """Compile all launches without a cached report."""
        launches = {repr(form.launch): form.launch for form in forms}
        missing = [
            launch
            for key, launch in launches.items()
            if any((kernels, key, arch) not in self._reports for arch in archs)
        ]
        if not missing:
            return
        worker = await asyncio.to_thread(self._running_worker, document.path, python)
        request = CompileRequest(
            path=document.path,
            name=f"{Path(document.path).stem}__saved",
            source=kernels,
            launches=tuple(missing),
            archs=tuple(archs),
            seconds=COMPILE_SECONDS,
        )
        try:
            report = await asyncio.to_thread(worker.call, request, 2 * COMPILE_SECONDS)
        finally:
            self._idle_timer = asyncio.get_running_loop().call_later(IDLE_SECONDS, worker.kill)
        jobs = [(launch, arch) for launch in missing for arch in archs]
        if len(self._reports) > MAX_CACHED_REPORTS:
            self._reports.clear()
        # If the kernels cannot be imported, there is only one report, with that error.
        if len(report.kernels) == len(jobs):
            self._reports |= {
                (kernels, repr(job), arch): r for (job, arch), r in zip(jobs, report.kernels, strict=True)
            }

    def _running_worker(self, path: str, python: str | None) -> Worker:
        from mtmc_lsp.app.interpreter import checked_python, find_python
        from mtmc_lsp.process.worker_process import Worker

        if self._idle_timer is not None:
            self._idle_timer.cancel()
        python = python or find_python(Path(path), read_settings(Path(path).parent))
        key = (python, self._server.root_of(path))
        if self._worker is None or self._worker_key != key:
            if self._worker is not None:
                self._worker.close()
            self._worker = Worker(checked_python(python), cwd=str(key[1]), low_priority=True)
            self._worker_key = key
        return self._worker


def finding_at(location_forms: Sequence[tuple[LaunchForm, list[KernelReport]]]) -> Finding | None:
    """The finding for all launch forms of one source location, for example configurations created in a loop."""
    oversized = [(form, reports) for form, reports in location_forms if any(map(_is_over, reports))]
    if not oversized:
        return None
    form, reports = max(oversized, key=lambda item: max(report.shared_bytes for report in item[1]))
    fitting_archs = [report.arch for report in reports if report.shared_bytes and not _is_over(report)]
    needed_bytes = max(report.shared_bytes for report in reports if _is_over(report))
    limits = ", ".join(f"{report.arch} has {SHARED_LIMIT[report.arch]}" for report in reports if _is_over(report))
    message = f"{described(form.launch, 'num_stages')} needs {needed_bytes} bytes of shared memory, and {limits}"
    message += f"; it fits {', '.join(fitting_archs)}" if fitting_archs else "; use smaller blocks or fewer stages"
    if len(oversized) > 1:
        message = f"{len(oversized)} of {len(location_forms)} configurations are too large: {message}"
    # The autotuner skips a configuration that does not fit; a plain launch fails.
    severity = Severity.WARNING if form.is_tuned else Severity.ERROR
    return Finding(CODE, Severity.HINT if fitting_archs else severity, form.start, form.end, message)


def _is_over(report: KernelReport) -> bool:
    return report.shared_bytes > SHARED_LIMIT[report.arch]
