"""What ``mtmc repair`` shows in a terminal."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.text import Text

from mtmc_lsp.app.kernels.repair import RepairReport
from mtmc_lsp.report.console import short_path, show, show_commands
from mtmc_lsp.report.phrases import verdict_line
from mtmc_lsp.report.text import coloured

WRONG, RIGHT, SKIPPED = ("✗", "red"), ("✓", "green"), ("-", "yellow")
DISTINCT = (
    "the integers of a tensor differ from each other: where they are equal, programs store different values to one element; "
    "name a reference to check such inputs"
)
WITHOUT_REFERENCE = (
    "no reference is named, so results were compared with the kernel's at sizes where it shows no fault; "
    "name a PyTorch function: # mtmc: reference=NAME"
)


def show_repair(out: Console, report: RepairReport, backup: Path | None, run: str = "") -> None:
    """Show the faults with their smallest case, the repairs as a diff, and how they were verified."""
    kernels = ", ".join(report.kernels)
    show(out, f"{report.target.launcher.qualname} ({kernels}): {_headline(report)}", style="bold")
    failing = report.failing
    if failing is not None:
        for fault in failing.faults:
            show(out, fault.place_and_detail, first=Text.assemble(WRONG, " "))
        show(out, f"the smallest case: {failing.case.text or 'the workload'}", style="dim", indent=2)
    if report.verdict is not None and not report.verdict.is_correct:
        show(out, report.verdict.reason, first=Text.assemble(WRONG, " "))
    for item in report.findings:
        text = f"line {item.line}: {item.finding.message} ({item.finding.code})"
        show(out, text, first=Text.assemble(SKIPPED, " "))
    for made in report.result.repairs:
        first = Text.assemble(RIGHT, " repair, ") if report.is_repaired else Text.assemble(SKIPPED, " not enough, ")
        show(out, f"line {made.line}: {made.title}", first=first)
    if report.diff:
        out.print()
        out.print(coloured(report.diff), soft_wrap=True, end="")
        out.print()
    _show_verification(out, report)
    path = report.target.opened.path
    if backup is not None:
        show(out, f"written to {short_path(path)}; the text before is in {short_path(backup)}")
        show_commands(out, [(f"mtmc undo {run}", "take the repairs out of the file again")])
    elif report.is_repaired:
        spec = f"{short_path(path)}::{report.target.opened.qualname}"
        show_commands(out, [(f"mtmc repair {spec} --apply", "write the repairs into the file")])


def _headline(report: RepairReport) -> str:
    if report.was_sound:
        return "no fault"
    if report.is_repaired:
        count = len(report.result.repairs)
        return f"repaired by {count} edit{'s' * (count > 1)}"
    return "faulty, and no repair was verified"


def _show_verification(out: Console, report: RepairReport) -> None:
    sound = sum(trace.is_sound and not trace.refusal for trace in report.result.traces)
    reference, verdict = report.target.reference, report.result.verdict
    distinct = sum(trace.case.has_distinct_integers for trace in report.traces)
    if distinct:
        show(out, f"in {distinct} of {len(report.traces)} cases {DISTINCT}", style="dim")
    show(out, f"{sound} of {len(report.result.traces)} observed cases show no fault", style="dim")
    if reference is None:
        show(out, WITHOUT_REFERENCE, style="dim")
    elif verdict is not None and (report.was_sound or report.is_repaired):
        show(out, f"compared with {reference.target.qualname}: {verdict_line(verdict)}", style="bold green")
        for note in verdict.notes:
            show(out, note, style="dim", indent=2)
