"""``mtmc repair``: detects faults of kernels that are already in a file, and repairs them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from mtmc_lsp.app.kernels.opening import KernelTarget
from mtmc_lsp.app.kernels.session import KernelSession
from mtmc_lsp.core.errors import Location, RequestError
from mtmc_lsp.core.results import Verdict
from mtmc_lsp.kernels.messages import CaseTrace
from mtmc_lsp.kernels.repairs.static import StaticFinding
from mtmc_lsp.kernels.search import Repaired, RepairSearch
from mtmc_lsp.kernels.sizes import quick_cases
from mtmc_lsp.process.project_files import FOLDER
from mtmc_lsp.source.files import unified_diff, write_if_unchanged

SEARCH_SECONDS = 120.0
NO_CASE = "no sizes of the example inputs are small enough for Triton's interpreter"


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


def repair_kernel(session: KernelSession, *, seconds: float = SEARCH_SECONDS) -> RepairReport:
    """Detect the faults of the file, and repair them. Nothing is written.

    Raises:
        MtmcError: the launcher or its reference cannot run on the workload.
    """
    text = session.target.opened.text
    session.on_stage("observing the kernels")
    cases = session.cases()
    traces = session.trace(text, cases)
    reasons = [trace.refusal for trace in traces]
    if all(reasons):
        raise RequestError(
            f"no call of {session.target.launcher.qualname} could be observed: {reasons[0]}" if reasons else NO_CASE,
            where=Location(str(session.target.opened.path), session.target.launcher.start_line),
            remedy="Change the example inputs, so that the launcher accepts them and a call is short.",
        )
    verdict = None
    if all(trace.is_sound for trace in traces) and session.target.reference is not None:
        verdict = session.verify(text)
    names = session.kernel_names(traces)
    search = RepairSearch(
        str(session.target.opened.path),
        names,
        quick_cases(traces),
        session.trace,
        session.verify if session.target.reference is not None else None,
        seconds,
    )
    findings = search.findings(text)
    session.on_stage("trying repairs")
    chosen = set(map(id, quick_cases(traces)))
    result = search.run(text, [trace for trace in traces if id(trace.case) in chosen], verdict)
    return RepairReport(session.target, names, tuple(traces), verdict, tuple(findings), result)


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
