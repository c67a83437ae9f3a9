"""The processes that observe, verify and compile the kernels of one file."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from mtmc_lsp.app.kernels.opening import KernelTarget
from mtmc_lsp.capture.client import run_capture
from mtmc_lsp.compile.messages import CompileRequest
from mtmc_lsp.core.errors import Location, MtmcError, RequestError
from mtmc_lsp.core.results import CompileReport, Verdict
from mtmc_lsp.core.workload import Capture, TargetKind, WorkloadSource
from mtmc_lsp.kernels.candidate import LauncherInFile
from mtmc_lsp.kernels.messages import (
    MOST_STEPS,
    CaseTrace,
    Configs,
    KernelCheckRequest,
    KernelCompileRequest,
    TraceAnswer,
    TraceCase,
    TraceRequest,
)
from mtmc_lsp.kernels.repairs.site import sites_of, with_helpers
from mtmc_lsp.kernels.sizes import trace_cases
from mtmc_lsp.measure.foreign_candidate import verify_foreign
from mtmc_lsp.process.fork_server import HIDDEN_GPU, INTERPRETER_ENV, ForkServer, likely_variables
from mtmc_lsp.process.messages import StartRequest
from mtmc_lsp.process.protocol import GpuLock
from mtmc_lsp.process.worker_process import Worker
from mtmc_lsp.source.triton.drivers import without_driver_calls
from mtmc_lsp.verify.reference import Reference

TRACE_SECONDS, CAPTURE_SECONDS = 120.0, 180.0
COMPILE_SECONDS, COMPILE_SLACK = 120.0, 60.0
"""Time for compiling a version, and for loading the file before."""
MEMORY = 8 << 30
START_SECONDS = 120.0
SEED = 0
MOST_SCRIPT_STEPS = 8_000
"""Memory operations of a test or benchmark of the file that are observed: about 5 s."""


class KernelSession:
    """Owns the processes that observe and verify the kernels of one file."""

    def __init__(
        self,
        target: KernelTarget,
        on_stage: Callable[[str], None] = lambda _: None,
        fork_server: ForkServer | None = None,
        compiling_server: ForkServer | None = None,
    ) -> None:
        """Describe the session without starting a process.

        Args:
            fork_server: one with Triton's interpreter, which the caller closes; None for a new one.
            compiling_server: one without it, whose workers compile at once; None lets the other one fork them.
        """
        self.target, self.on_stage = target, on_stage
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """Seconds of the calls to its processes, by what they do. Calls may overlap."""
        self._compiling_server = compiling_server
        self._resources = ExitStack()
        self._fork_server, self._is_lent = fork_server, fork_server is not None
        self._worker: Worker | None = None
        self._reference: Reference | None = None
        self._capture: Capture | None = None
        self._plain: Worker | None = None
        # The top-level calls of a test run its kernels at import; the observed call runs them anyway.
        kernels = [site.kernel.name for site in sites_of(str(target.opened.path), target.opened.text)]
        self._driven = kernels if target.observed_workload.source is WorkloadSource.SCRIPT else []

    def __enter__(self) -> KernelSession:
        if self._fork_server is None:
            # Most workers interpret kernels, also on a machine with a GPU.
            self._fork_server = ForkServer(self.target.opened.python, INTERPRETER_ENV, preload=True)
            self._resources.callback(self._fork_server.close)
            self._fork_server.start()
        self._worker = self._resources.enter_context(self._new_worker(interpreted=True))
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def kill(self) -> None:
        """End every process without waiting. Safe in a signal handler."""
        if self._fork_server is not None and not self._is_lent:
            self._fork_server.kill()
        if self._worker is not None:
            self._worker.kill()
        if self._plain is not None:
            self._plain.kill()

    def start_interpreter(self) -> None:
        """Wait until the process that interprets kernels runs: its imports count to no observation."""
        assert self._worker is not None
        with self.spent("start"):
            self._worker.call(StartRequest(gpu=False), START_SECONDS)

    def trace(
        self,
        text: bytes,
        cases: Sequence[TraceCase],
        *,
        most_programs: int = 0,
        compares_faulty: bool = False,
        seconds: float = TRACE_SECONDS,
    ) -> Sequence[CaseTrace]:
        """Observe a text on cases; empty if it cannot be loaded, or does not end.

        Args:
            seconds: the time limit.

        Raises:
            RequestError: the user's own text cannot be loaded.
        """
        assert self._worker is not None
        target, is_original = self.target, text == self.target.opened.text
        original = self.importable(target.opened.text)
        # A sample of the programs needs no values, so it runs at the sizes of the workload.
        request = TraceRequest(
            target.workload if most_programs else target.observed_workload,
            self.importable(text),
            tuple(cases),
            target.reference,
            original if target.reference is not None or not is_original else "",
            most_programs=most_programs,
            most_steps=MOST_SCRIPT_STEPS if self._driven else MOST_STEPS,
            compares_faulty=compares_faulty,
        )
        try:
            with self.spent("interpreter"):
                answer = self._worker.call(request, seconds)
        except MtmcError:
            if is_original:
                raise
            return ()
        if answer.problem and is_original:
            raise RequestError(
                f"the file cannot be loaded: {answer.problem}",
                where=Location(str(target.opened.path)),
                remedy="Run the file itself, and remove the error.",
            )
        return answer.cases

    def check(
        self,
        text: bytes,
        cases: Sequence[TraceCase],
        lock: GpuLock | None,
        seconds: float,
        configs: Configs = Configs.FIRST,
        *,
        has_zero_indices: bool = False,
    ) -> TraceAnswer:
        """Run a text on the GPU, and compare its results with those of the file as it stands.

        Args:
            has_zero_indices: see :class:`~mtmc_lsp.kernels.messages.KernelCheckRequest`.

        Raises:
            MtmcError: the process ended, or cannot use the GPU any more.
        """
        source = self.importable(text)
        original = self.importable(self.target.opened.text)
        request = KernelCheckRequest(
            self.target.observed_workload, original, source, tuple(cases), configs, has_zero_indices
        )
        with self.spent("check"):
            return self.plain_worker().call(request, seconds, lock)

    def verify(self, text: bytes) -> Verdict:
        """Compare the launcher in a text with the reference.

        Raises:
            MtmcError: the reference cannot be captured.
        """
        self.on_stage("verifying")
        if self._reference is None:
            self._reference = self._open_reference()
        assert self._capture is not None
        original = self.target.opened.text.decode()
        candidate = LauncherInFile(self._capture, self.target.launcher, text.decode(), original=original)
        with self.spent("verify"):
            result, _ = verify_foreign(candidate, self._reference)
        return result.verdict

    def compile(self, request: CompileRequest) -> CompileReport:
        """Compile kernels of the file for GPUs."""
        self.on_stage("compiling")
        importable = replace(request, source=self.importable(request.source.encode()))
        with self.spent("compile"):
            return self.plain_worker().call(KernelCompileRequest(importable), request.seconds + COMPILE_SLACK)

    def cases(self) -> list[TraceCase]:
        """The cases on which the launcher is observed, the smallest first."""
        return list(trace_cases(self.target.observed_workload, self.target.opened.text.decode()))

    def kernel_names(self, traces: Sequence[CaseTrace]) -> tuple[str, ...]:
        """The kernels that the calls launched; all of the file if none did."""
        definition, sites = (
            self.target.opened.definition,
            sites_of(str(self.target.opened.path), self.target.opened.text),
        )
        if definition.kind is TargetKind.KERNEL:
            return with_helpers(sites, [definition.qualname])
        launched = {work.launch.kernel for trace in traces for work in trace.launches}
        launched |= {fault.kernel for trace in traces for fault in trace.faults} - {""}
        names = tuple(site.kernel.name for site in sites)
        return with_helpers(sites, [name for name in names if name in launched]) or names

    def importable(self, text: bytes) -> str:
        """The text without top-level calls of its test, which would run its kernels at import."""
        return (without_driver_calls(text, self._driven) if self._driven else text).decode()

    def plain_worker(self) -> Worker:
        """A worker without Triton's interpreter: it compiles for GPUs, and times on the GPU of this machine."""
        if self._plain is None:
            opened = self.target.opened
            # Forked from the server with the interpreter, it imports Triton again, which takes up to a second.
            server = self._compiling_server or self._fork_server
            worker = Worker(opened.python, cwd=str(opened.project), fork_server=server)
            self._plain = self._resources.enter_context(worker)
        return self._plain

    @contextmanager
    def spent(self, name: str) -> Iterator[None]:
        """Count the time of this context."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] += time.monotonic() - began

    # Parts -----------------------------------------------------------------------------------------------------------

    def _new_worker(self, *, interpreted: bool) -> Worker:
        env = {**INTERPRETER_ENV, **HIDDEN_GPU} if interpreted else likely_variables()
        opened = self.target.opened
        return Worker(
            opened.python, cwd=str(opened.project), env=env, memory_bytes=MEMORY, fork_server=self._fork_server
        )

    def _open_reference(self) -> Reference:
        workload, opened = self.target.reference, self.target.opened
        assert workload is not None
        with self._new_worker(interpreted=False) as worker:
            self._capture = run_capture(workload, opened.text, worker, CAPTURE_SECONDS)
        reference = Reference(
            self._capture,
            opened.text.decode(),
            opened.python,
            seed=SEED,
            precision=opened.settings.precision,
            fork_server=self._fork_server,
        )
        return self._resources.enter_context(reference)
