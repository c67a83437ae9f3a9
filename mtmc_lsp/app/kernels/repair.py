"""``mtmc repair``: detects faults of kernels that are already in a file, and repairs them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from mtmc_lsp.app.target_file import OpenTarget
from mtmc_lsp.capture.client import find_workload, run_capture
from mtmc_lsp.capture.recorded_calls import RECORDS
from mtmc_lsp.compile.messages import CompileRequest
from mtmc_lsp.core.errors import Location, MtmcError, RequestError
from mtmc_lsp.core.results import CompileReport, Verdict
from mtmc_lsp.core.workload import Capture, Target, TargetKind, Workload
from mtmc_lsp.kernels.candidate import LauncherInFile
from mtmc_lsp.kernels.messages import CaseTrace, TraceCase, TraceRequest
from mtmc_lsp.kernels.repairs.site import sites_of, with_helpers
from mtmc_lsp.kernels.repairs.static import StaticFinding
from mtmc_lsp.kernels.search import Repaired, RepairSearch
from mtmc_lsp.kernels.sizes import quick_cases, trace_cases
from mtmc_lsp.measure.foreign_candidate import verify_foreign
from mtmc_lsp.process.fork_server import ForkServer, likely_variables
from mtmc_lsp.process.project_files import FOLDER
from mtmc_lsp.process.worker_process import Worker
from mtmc_lsp.source.files import unified_diff, write_if_unchanged
from mtmc_lsp.source.syntax import line_of
from mtmc_lsp.source.targets import find_target, find_targets
from mtmc_lsp.source.workload.directive import parse_directive, reference_name
from mtmc_lsp.verify.reference import Reference

TRACE_SECONDS, CAPTURE_SECONDS = 120.0, 180.0
SEARCH_SECONDS = 120.0
COMPILE_SLACK = 60.0
"""Time for loading the file before it is compiled."""
MEMORY = 8 << 30
SEED = 0


@dataclass(frozen=True)
class KernelTarget:
    """A launcher with its kernels, its workload and its reference."""

    opened: OpenTarget
    launcher: Target
    workload: Workload
    reference: Workload | None
    """Of the function with the expected results; None if the file names none."""


@dataclass(frozen=True)
class RepairReport:
    """What was found in a file, and the repaired text."""

    target: KernelTarget
    kernels: tuple[str, ...]
    traces: tuple[CaseTrace, ...]
    """Of the file as it is."""
    verdict: Verdict | None
    """On the file as it is; None if the cases showed a fault, or without a reference."""
    findings: tuple[StaticFinding, ...]
    """Of the static checks in the file as it is."""
    result: Repaired

    @property
    def failing(self) -> CaseTrace | None:
        """The smallest case that shows a fault."""
        return next((trace for trace in self.traces if trace.faults), None)

    @property
    def was_sound(self) -> bool:
        """Whether the file shows no fault."""
        is_correct = self.verdict is None or self.verdict.is_correct
        return self.failing is None and is_correct and not self.result.repairs

    @property
    def is_repaired(self) -> bool:
        """Whether edits removed all faults, and verification accepts the text if there is a reference."""
        return bool(self.result.repairs) and self.result.is_sound

    @property
    def summary(self) -> str:
        """The outcome in one sentence."""
        if self.was_sound:
            return "no fault"
        failing, wrong = self.failing, self.verdict is not None and not self.verdict.is_correct
        fault = failing.faults[0].place_and_detail if failing is not None else ""
        if wrong and self.verdict is not None:
            fault = self.verdict.reason
        if not self.is_repaired:
            return f"faulty, and no repair was verified: {fault}"
        titles = "; ".join(item.title for item in self.result.repairs)
        return f"{fault or 'a static check reports it'}. Repair: {titles}"

    @property
    def diff(self) -> str:
        """The change as a unified diff; empty if nothing was repaired."""
        name = self.target.opened.path.name
        return unified_diff(self.target.opened.text.decode(), self.result.text.decode(), name)


def open_kernel(opened: OpenTarget) -> KernelTarget:
    """The launcher, the workload and the reference of a kernel, or of the function that launches it.

    Raises:
        RequestError: nothing launches the kernel, or the reference does not exist or takes other arguments.
        NoWorkload: neither the launcher nor the reference has example inputs.
    """
    path, text = str(opened.path), opened.text
    launcher = _launcher(opened)
    name = reference_name(text, launcher, path) or reference_name(text, opened.definition, path)
    reference = None
    if name:
        try:
            reference = find_target(text, path, name)
        except RequestError:
            raise RequestError(
                f"the directive names the reference {name}, which the file does not define",
                where=Location(path, launcher.start_line),
                remedy="Name a PyTorch function of the same file: # mtmc: reference=NAME.",
            ) from None
    records = opened.project / FOLDER / RECORDS
    workload = parse_directive(text, launcher, path)
    if workload is None and reference is not None:
        described = find_workload(path, text, reference, records)
        return KernelTarget(opened, launcher, _for_target(described, launcher, text), described)
    workload = workload or find_workload(path, text, launcher, records)
    expected = _for_target(workload, reference, text) if reference is not None else None
    return KernelTarget(opened, launcher, workload, expected)


def _launcher(opened: OpenTarget) -> Target:
    definition, path = opened.definition, str(opened.path)
    if definition.kind is TargetKind.FUNCTION:
        return definition
    if definition.kind is not TargetKind.KERNEL:
        raise RequestError(
            f"{definition.qualname} is no kernel and no function",
            where=Location(path, definition.start_line),
            remedy="Name a @triton.jit kernel, or the function that launches it.",
        )
    sites = sites_of(path, opened.text, [definition.qualname.rpartition(".")[2]])
    lines = [line_of(launch.call) for site in sites for launch in site.launches]
    functions = [item for item in find_targets(opened.text, path) if item.kind is TargetKind.FUNCTION]
    launching = [item for item in functions if any(item.start_line <= line <= item.end_line for line in lines)]
    if not launching:
        raise RequestError(
            f"no function of the file launches {definition.qualname}",
            where=Location(path, definition.start_line),
            remedy="Write a function that launches it, with a directive such as # mtmc: x=f32[M,N] M=64 N=1024.",
        )
    described = [item for item in launching if parse_directive(opened.text, item, path) is not None]
    return (described or launching)[0]


def _for_target(workload: Workload, target: Target, text: bytes) -> Workload:
    """The workload with another target, whose parameters get the arguments by position.

    Raises:
        RequestError: the other target takes another number of arguments.
    """
    from mtmc_lsp.source.workload.signatures import signature_of

    signature = signature_of(text, target)
    names = [parameter.name for parameter in signature.parameters] if signature is not None else []
    by_name = {argument.name for argument in workload.arguments}
    if by_name <= set(names):
        return replace(workload, target=target)
    if len(names) < len(workload.arguments):
        raise RequestError(
            f"{target.qualname} takes {len(names)} arguments, and {workload.target.qualname} takes "
            f"{len(workload.arguments)}",
            where=Location(target.path, target.start_line),
            remedy="Give both the same parameters.",
        )
    arguments = tuple(replace(argument, name=name) for argument, name in zip(workload.arguments, names, strict=False))
    return replace(workload, target=target, arguments=arguments)


class RepairSession:
    """Owns the processes that observe and verify the kernels of one file."""

    def __init__(self, target: KernelTarget, on_stage: Callable[[str], None] = lambda _: None) -> None:
        self.target, self._on_stage = target, on_stage
        self._resources = ExitStack()
        self._fork_server: ForkServer | None = None
        self._worker: Worker | None = None
        self._reference: Reference | None = None
        self._capture: Capture | None = None
        self._problem = ""

    def __enter__(self) -> RepairSession:
        self._fork_server = ForkServer(self.target.opened.python, likely_variables(), preload=True)
        self._resources.callback(self._fork_server.close)
        self._fork_server.start()
        self._worker = self._resources.enter_context(self._new_worker(interpreted=True))
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def kill(self) -> None:
        """End every process without waiting. Safe in a signal handler."""
        if self._fork_server is not None:
            self._fork_server.kill()

    def trace(self, text: bytes, cases: Sequence[TraceCase], *, most_programs: int = 0) -> Sequence[CaseTrace]:
        """Observe a text on cases; empty if it cannot be loaded, or does not end.

        Raises:
            RequestError: the user's own text cannot be loaded.
        """
        assert self._worker is not None
        target, is_original = self.target, text == self.target.opened.text
        original = target.opened.text.decode() if target.reference is not None or not is_original else ""
        request = TraceRequest(
            target.workload, text.decode(), tuple(cases), target.reference, original, most_programs=most_programs
        )
        try:
            answer = self._worker.call(request, TRACE_SECONDS)
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

    def repair(self, *, seconds: float = SEARCH_SECONDS) -> RepairReport:
        """Detect the faults of the file, and repair them. Nothing is written.

        Raises:
            MtmcError: the launcher or its reference cannot run on the workload.
        """
        text = self.target.opened.text
        self._on_stage("observing the kernels")
        cases = self._cases()
        traces = self.trace(text, cases)
        verdict = None
        if all(trace.is_sound for trace in traces) and self.target.reference is not None:
            verdict = self.verify(text)
        names = self._kernel_names(traces)
        search = RepairSearch(
            str(self.target.opened.path),
            names,
            quick_cases(traces),
            self.trace,
            self.verify if self.target.reference is not None else None,
            seconds,
        )
        findings = search.findings(text)
        self._on_stage("trying repairs")
        chosen = set(map(id, quick_cases(traces)))
        result = search.run(text, [trace for trace in traces if id(trace.case) in chosen], verdict)
        return RepairReport(self.target, names, tuple(traces), verdict, tuple(findings), result)

    def verify(self, text: bytes) -> Verdict:
        """Compare the launcher in a text with the reference.

        Raises:
            MtmcError: the reference cannot be captured.
        """
        self._on_stage("verifying")
        if self._reference is None:
            self._reference = self._open_reference()
        assert self._capture is not None
        original = self.target.opened.text.decode()
        candidate = LauncherInFile(self._capture, self.target.launcher, text.decode(), original=original)
        result, _ = verify_foreign(candidate, self._reference)
        return result.verdict

    def compile(self, request: CompileRequest) -> CompileReport:
        """Compile kernels of the file for GPUs."""
        self._on_stage("compiling")
        opened = self.target.opened
        # The fork server's Triton interprets kernels, so it cannot compile them.
        with Worker(opened.python, cwd=str(opened.project)) as worker:
            return worker.call(request, request.seconds + COMPILE_SLACK)

    # Parts -----------------------------------------------------------------------------------------------------------

    def _cases(self) -> list[TraceCase]:
        return list(trace_cases(self.target.workload, self.target.opened.text.decode()))

    def _kernel_names(self, traces: Sequence[CaseTrace]) -> tuple[str, ...]:
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

    def _new_worker(self, *, interpreted: bool) -> Worker:
        env = dict(self._fork_server.env) if self._fork_server is not None else {}
        if interpreted:
            env["TRITON_INTERPRET"] = "1"
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


def apply_repair(report: RepairReport) -> Path | None:
    """Write the repaired text into the file; returns the backup of the text before, None if nothing was repaired.

    Raises:
        FileChanged: the file changed since it was read.
    """
    opened = report.target.opened
    if report.result.text == opened.text:
        return None
    digest = hashlib.sha256(opened.text).hexdigest()
    return write_if_unchanged(opened.path, digest, report.result.text, opened.project / FOLDER / "backups")
