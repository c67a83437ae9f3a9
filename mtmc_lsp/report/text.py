"""A run as text for a terminal."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from mtmc_lsp.core.action import MacroAction
from mtmc_lsp.core.results import Ratio, Timing, Verdict
from mtmc_lsp.core.run import RunResult, RunStatus, Step, StepStatus

STYLE = {StepStatus.ACCEPTED: "green", StepStatus.REJECTED: "yellow", StepStatus.FAILED: "red"}
MARK = {StepStatus.ACCEPTED: "✓", StepStatus.REJECTED: "–", StepStatus.FAILED: "✗"}


def show_action(console: Console, index: int, action: MacroAction) -> None:
    """Headline and reason of a step that is being tried."""
    console.print()
    console.print(Text(f"Step {index}  {action.text}", style="bold"))
    console.print(Text(f"  {action.rationale}", style="dim"))
    if action.changes_rounding:
        console.print(Text("  This step changes rounding, within the error budget.", style="dim"))


def show_step(console: Console, step: Step, *, diff: bool) -> None:
    """What came of a step."""
    if diff and step.diff and step.status is not StepStatus.FAILED:
        console.print(Syntax(step.diff, "diff", theme="ansi_dark", background_color="default"))
    if step.verdict is not None:
        console.print(Text(f"  {verdict_line(step.verdict)}"))
        for note in step.verdict.notes:
            console.print(Text(f"    {note}", style="dim"))
    if step.report is not None:
        for kernel in step.report.kernels:
            if kernel.registers is not None:
                occupancy = f", occupancy {kernel.occupancy:.0%}" if kernel.occupancy is not None else ""
                line = (
                    f"    {kernel.kernel} on {kernel.arch}: {kernel.registers} registers, {kernel.spills} bytes spilled"
                )
                console.print(Text(f"{line}, {kernel.shared_bytes} bytes shared{occupancy}", style="dim"))
    if step.timing is not None:
        console.print(timing_table(step.timing))
    console.print(Text(f"  {MARK[step.status]} {step.status.value}: {step.reason}", style=STYLE[step.status]))


def verdict_line(verdict: Verdict) -> str:
    """The verdict in one line, with both errors."""
    how = "on the GPU" if verdict.mode == "gpu" else "by Triton's interpreter"
    if not verdict.is_correct:
        return f"{verdict.status.value} {how}: {verdict.reason}"
    errors = f"relative error {verdict.error:.1e}, the original's own is {verdict.reference_error:.1e}"
    return f"correct {how}: {len(verdict.checks)} checks, {errors}"


def ratio_text(ratio: Ratio | None) -> str:
    """``1.83x (1.79 to 1.86)``."""
    return f"{ratio.ratio:.2f}x ({ratio.low:.2f} to {ratio.high:.2f})" if ratio else "-"


def timing_table(timing: Timing) -> RenderableType:
    """Times against every baseline."""
    table = Table(box=None, padding=(0, 2), show_edge=False)
    for title in ("  baseline", "its time", "speedup"):
        table.add_column(title, justify="left" if title.strip() == "baseline" else "right")
    for baseline in timing.baselines:
        time = f"{baseline.median_us:.1f} us" if baseline.speedup else baseline.note
        table.add_row(f"  {baseline.name}", time, ratio_text(baseline.speedup))
    line = f"  this version {timing.median_us:.1f} us, {timing.roofline:.0%} of the memory roofline, {timing.samples} samples"
    return Group(table, Text(line, style="dim"))


def show_result(console: Console, result: RunResult) -> None:
    """The end of a run."""
    console.print()
    accepted = sum(step.status is StepStatus.ACCEPTED for step in result.steps)
    console.print(Text(headline(result), style="bold green" if accepted else "bold"))
    console.print(
        Text(
            f"  {accepted} of {len(result.steps)} steps accepted in {result.seconds:.0f} s, run {result.id}",
            style="dim",
        )
    )
    for note in result.workload.assumed:
        console.print(Text(f"  {note}", style="dim"))


def headline(result: RunResult) -> str:
    """The outcome in one sentence."""
    if result.status is RunStatus.UNMEASURED:
        archs = list(dict.fromkeys(k.arch for s in result.steps if s.report for k in s.report.kernels))
        return f"unmeasured: no CUDA GPU; verified by Triton's interpreter and compiled for {', '.join(archs)}"
    if result.status is RunStatus.IMPROVED and result.final.speedup is not None:
        best = min(result.baselines, key=lambda b: b.median_us if b.speedup else float("inf"))
        return f"improved: {ratio_text(result.final.speedup.vs_best)} over {best.name}, the best baseline, on {result.environment.gpu}"
    if result.status is RunStatus.INCORRECT:
        return "incorrect: no step could be verified, so the file stays as it is"
    return "no gain: nothing was faster than what you have, so the file stays as it is"
