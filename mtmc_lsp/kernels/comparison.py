"""Compares what versions of kernels showed with what the file as it stands shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mtmc_lsp.core.results import OBSERVED, Check, CheckStatus, CompileReport, KernelReport, Verdict, VerdictStatus
from mtmc_lsp.kernels.messages import NOT_COMPARED, VARIES, CaseTrace, Fault, FaultKind
from mtmc_lsp.kernels.refusals import DOES_NOT_COMPILE

VALUES = "values"


def compared(before: Sequence[CaseTrace], after: Sequence[CaseTrace]) -> Verdict:
    """Whether a version shows no further fault and the same results as the file as it stands, on each case."""
    checks = []
    for earlier, later in zip(before, after, strict=False):
        if earlier.refusal or _raises(earlier) or later.refusal in NOT_COMPARED:
            continue
        known = {(fault.kind, fault.kernel) for fault in earlier.faults}
        new = [fault for fault in later.faults if (fault.kind, fault.kernel) not in known]
        detail = later.refusal or (new[0].place_and_detail if new else "")
        status = CheckStatus.FAILED if detail else CheckStatus.PASSED
        checks.append(Check(VALUES, status, earlier.case.text or "the workload", detail))
    mode, failed = OBSERVED, next((check for check in checks if check.status is CheckStatus.FAILED), None)
    if not after:
        return Verdict(
            VerdictStatus.COMPILE_ERROR, (), mode, reason="the edited file cannot be loaded, or does not end"
        )
    if failed is not None:
        reason = f"{failed.detail} (on {failed.case})"
        return Verdict(VerdictStatus.INCORRECT, tuple(checks), mode, reason=reason)
    if not checks:
        varies = any(trace.refusal == VARIES for trace in after)
        reason = VARIES if varies else "the kernels as they stand run on no case, so nothing can be compared"
        return Verdict(VerdictStatus.UNCERTIFIABLE, (), mode, reason=reason)
    notes = (f"compared with the kernels as they stand on {len(checks)} cases",)
    return Verdict(VerdictStatus.CORRECT_AT_REDUCED_SIZES, tuple(checks), mode, notes=notes)


def worse(report: CompileReport, known: Mapping[tuple[str, str], KernelReport]) -> str:
    """Why the compiler's statistics speak against a version: it does not compile, or spills more; empty if they do not."""
    for kernel in report.kernels:
        earlier = known.get((kernel.kernel, kernel.arch))
        if earlier is None or earlier.error:
            continue
        if kernel.error:
            return f"{kernel.kernel} {DOES_NOT_COMPILE} for {kernel.arch}: {kernel.error.splitlines()[0]}"
        if (kernel.spills or 0) > (earlier.spills or 0):
            return f"{kernel.kernel} spills {kernel.spills} bytes on {kernel.arch}, {earlier.spills or 0} before"
    return ""


def original_fault(traces: Sequence[CaseTrace]) -> tuple[CaseTrace, Fault] | None:
    """The smallest case on which the file as it stands shows a fault."""
    return next(((trace, trace.faults[0]) for trace in traces if trace.faults), None)


def runs_on_a_case(traces: Sequence[CaseTrace]) -> bool:
    """Whether the kernels as they stand run on any case."""
    return any(not trace.refusal and not _raises(trace) for trace in traces)


def _raises(trace: CaseTrace) -> bool:
    return any(fault.kind is FaultKind.RAISES for fault in trace.faults)
