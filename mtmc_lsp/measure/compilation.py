"""Cross-compiles the kernels of candidates: those of the workload at once, those of other sizes in the background."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import replace

from mtmc_lsp.compile.launcher_calls import launcher_calls
from mtmc_lsp.compile.messages import CompileRequest, CompileVariantsRequest, PrepareCompilerRequest
from mtmc_lsp.core.errors import FailureKind, MtmcError, WorkerFailed
from mtmc_lsp.core.results import CompileReport, KernelReport
from mtmc_lsp.core.run import Candidate
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.process.worker_pool import WorkerPool
from mtmc_lsp.process.worker_process import Worker

COMPILE_SECONDS = 180.0


class KernelCompiler:
    """Compiles candidates of one capture."""

    def __init__(
        self,
        capture: Capture,
        pool: WorkerPool,
        worker: Worker,
        background_worker: Worker,
        background: Executor,
        *,
        archs: tuple[str, ...],
        seconds: float,
    ) -> None:
        """Prepare without compiling.

        Args:
            worker: compiles what the caller waits for.
            background_worker: compiles ahead, with low priority.
            background: runs the calls to ``background_worker``.
            seconds: time limit for one candidate.
        """
        self._capture, self._pool, self._worker, self._background_worker = capture, pool, worker, background_worker
        self._background, self._archs, self._seconds = background, archs, seconds
        self._pending: list[Future[None]] = []
        self._is_prepared = False

    def prepare(self) -> None:
        """Start the process in the background, so that the first compilation need not wait for imports."""
        if not self._is_prepared:
            self._is_prepared = True
            self._background.submit(self._prepare)

    def _prepare(self) -> None:
        # The compilation reports an error.
        with contextlib.suppress(MtmcError):
            self._pool.call_unlocked(self._worker, PrepareCompilerRequest(), self._seconds)

    def compile(self, candidate: Candidate) -> CompileReport:
        """Compile every kernel for every architecture."""
        try:
            return self._pool.call_unlocked(self._worker, self._whole_request(candidate), 2 * self._seconds)
        except WorkerFailed as error:
            if error.kind is FailureKind.DEADLINE:
                raise
            return CompileReport((KernelReport("", self._archs[0], error=error.message),))

    def compile_variants(self, candidates: Sequence[Candidate]) -> list[CompileReport]:
        """Compile several candidates at once, on all cores.

        Raises:
            WorkerFailed: the compiler's process failed.
        """
        request = CompileVariantsRequest(tuple(self._whole_request(item) for item in candidates), self._seconds)
        return list(self._pool.call_unlocked(self._worker, request, 2 * self._seconds).reports)

    def compile_in_background(self, candidate: Candidate, sizes: Sequence[Mapping[str, int]]) -> None:
        """Compile the kernels for other sizes in parallel, since a launch would compile one kernel at a time."""
        if candidate.code is not None:
            calls = launcher_calls(self._capture.graph, candidate.code, sizes)
            request = replace(self._request(candidate), calls=calls)
            self._pending.append(self._background.submit(self._compile_ahead, request))

    def stop_background(self) -> None:
        """End the background compilations."""
        for pending in self._pending:
            while not pending.cancel() and not pending.done():
                self._background_worker.kill()
                wait([pending], 0.1)
        self._pending.clear()

    def _compile_ahead(self, request: CompileRequest) -> None:
        with contextlib.suppress(MtmcError):
            self._pool.call_unlocked(self._background_worker, request, 2 * self._seconds)

    def _whole_request(self, candidate: Candidate) -> CompileRequest:
        """All launches of a candidate at the workload's sizes."""
        calls = None
        if candidate.code is not None and not candidate.launches:
            calls = launcher_calls(self._capture.graph, candidate.code, [self._capture.graph.sizes])
        return replace(self._request(candidate), launches=candidate.launches, calls=calls)

    def _request(self, candidate: Candidate) -> CompileRequest:
        return CompileRequest(
            path=self._capture.workload.target.path,
            name=self._capture.module_name,
            source=candidate.source,
            launches=(),
            archs=self._archs,
            seconds=self._seconds,
            builds_launchers=self._pool.has_gpu,
        )
