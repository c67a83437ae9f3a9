"""The static check that needs a compiler: on save, the file's kernels are compiled for the configured architectures.

It needs no GPU. What the kernels import is imported for it, in a worker; so it is done only in a folder that is trusted, and
nobody is asked for that. What it found stands until the text is another.
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
from mtmc_lsp.core.run import KernelLaunch
from mtmc_lsp.core.settings import read_settings
from mtmc_lsp.server.server import Document, Server
from mtmc_lsp.source.lint import remove_ignored
from mtmc_lsp.source.lint.finding import Finding, Severity

if TYPE_CHECKING:
    from mtmc_lsp.process.worker_process import Worker
    from mtmc_lsp.source.triton.launch_sites import LaunchForm

log = logging.getLogger(__name__)
CODE = "shared-memory"
COMPILE_SECONDS = 60.0
"""For all of one file."""
IDLE_SECONDS = 60.0
"""How long the worker is kept for the next save: importing torch takes seconds."""
MOST_REPORTS = 4000
"""Compilations that are remembered."""


def register(server: Server) -> None:
    """Have saved files looked at."""
    checks = CompileChecks(server)
    server.savers.append(checks.saved)
    server.closers.append(lambda _: checks.close())


class CompileChecks:
    """Compiles what was saved, one file after the other."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._lock = asyncio.Lock()
        self._worker: Worker | None = None
        self._made_for: tuple[str, Path] | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._known: dict[tuple[str, str, str], KernelReport] = {}
        """Of the text of a file's kernels, a launch and an architecture."""

    def saved(self, document: Document) -> None:
        """Look at a file that was saved, in the background."""
        if document.outline.kernels and self._server.trusts(document.path):
            self._server.background(self._check(document))

    def close(self) -> None:
        """End the worker."""
        if self._idle is not None:
            self._idle.cancel()
        if self._worker is not None:
            self._worker.kill()

    async def _check(self, document: Document) -> None:
        # Only here, as in what starts the worker: the server has little time to start.
        from mtmc_lsp.source.triton.launch_sites import launch_forms
        from mtmc_lsp.source.triton.standalone_kernels import standalone_kernels

        text = document.text.data
        own = await self._server.settings_of(document.uri)
        forms = launch_forms(document.outline, document.path)
        try:
            settings = read_settings(Path(document.path).parent)
            archs = [arch for arch in own.archs or settings.archs if arch in SHARED_LIMIT]
            kernels = standalone_kernels(document.outline)
            async with self._lock:
                if forms and document.text.data is text:
                    await self._compile(document, kernels, forms, archs, own.python)
        except MtmcError as error:
            # A run says it to the user; nobody asked for this one.
            log.info("%s was not compiled: %s", document.path, error)
            return
        places: dict[tuple[int, int], list[tuple[LaunchForm, list[KernelReport]]]] = {}
        for form in forms:
            reports = [self._known[key] for arch in archs if (key := (kernels, repr(form.launch), arch)) in self._known]
            places.setdefault((form.start, form.end), []).append((form, reports))
        found = [item for at_place in places.values() if (item := of_place(at_place)) is not None]
        if document.text.data is text:
            document.on_save = (text, remove_ignored(text, found))
            self._server.refresh(document.uri)

    async def _compile(
        self,
        document: Document,
        kernels: str,
        forms: Sequence[LaunchForm],
        archs: Sequence[str],
        python: str | None,
    ) -> None:
        """Compile what is not known yet."""
        launches = {repr(form.launch): form.launch for form in forms}
        missing = [
            launch for key, launch in launches.items() if any((kernels, key, arch) not in self._known for arch in archs)
        ]
        if not missing:
            return
        worker = await asyncio.to_thread(self._started, document.path, python)
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
            self._idle = asyncio.get_running_loop().call_later(IDLE_SECONDS, worker.kill)
        jobs = [(launch, arch) for launch in missing for arch in archs]
        if len(self._known) > MOST_REPORTS:
            self._known.clear()
        # Kernels that cannot be imported have one report, of that.
        if len(report.kernels) == len(jobs):
            self._known |= {(kernels, repr(job), arch): r for (job, arch), r in zip(jobs, report.kernels, strict=True)}

    def _started(self, path: str, python: str | None) -> Worker:
        from mtmc_lsp.app.interpreter import checked_python, find_python
        from mtmc_lsp.process.worker_process import Worker

        if self._idle is not None:
            self._idle.cancel()
        python = python or find_python(Path(path), read_settings(Path(path).parent))
        wanted = (python, self._server.root_of(path))
        if self._worker is None or self._made_for != wanted:
            if self._worker is not None:
                self._worker.close()
            self._worker = Worker(checked_python(python), cwd=str(wanted[1]), low_priority=True)
            self._made_for = wanted
        return self._worker


def of_place(at_place: Sequence[tuple[LaunchForm, list[KernelReport]]]) -> Finding | None:
    """What is to be said of the forms that one place in the file makes: a launch, or a configuration, made in a loop perhaps."""
    over = [(form, reports) for form, reports in at_place if any(map(_is_over, reports))]
    if not over:
        return None
    form, reports = max(over, key=lambda item: max(report.shared_bytes for report in item[1]))
    fits = [report.arch for report in reports if report.shared_bytes and not _is_over(report)]
    needs = max(report.shared_bytes for report in reports if _is_over(report))
    have = ", ".join(f"{report.arch} has {SHARED_LIMIT[report.arch]}" for report in reports if _is_over(report))
    message = f"{_described(form.launch)} needs {needs} bytes of shared memory, and {have}"
    message += f"; it fits {', '.join(fits)}" if fits else "; make the blocks or num_stages smaller"
    if len(over) > 1:
        message = f"{len(over)} of {len(at_place)} configurations are too large: {message}"
    # Triton leaves out a configuration that does not fit, and a plain launch fails.
    worst = Severity.WARNING if form.is_tuned else Severity.ERROR
    return Finding(CODE, Severity.HINT if fits else worst, form.start, form.end, message)


def _is_over(report: KernelReport) -> bool:
    return report.shared_bytes > SHARED_LIMIT[report.arch]


def _described(launch: KernelLaunch) -> str:
    sizes = {
        name: v for name, v in launch.constexprs.items() if isinstance(v, int) and not isinstance(v, bool) and v > 1
    }
    words = ", ".join(f"{name}={value}" for name, value in {**sizes, "num_stages": launch.num_stages}.items())
    return f"{launch.kernel} with {words}"
