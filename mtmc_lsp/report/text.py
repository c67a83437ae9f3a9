"""Text output for a terminal."""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from mtmc_lsp.app.backends import Question
from mtmc_lsp.app.doctor import Finding
from mtmc_lsp.app.record import Recording
from mtmc_lsp.app.why import GuardReport
from mtmc_lsp.core.action import MacroAction
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.results import CheckStatus, Timing
from mtmc_lsp.core.run import RunResult, RunStatus, Step, StepStatus
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.measure.foreign_candidate import ForeignVerdict
from mtmc_lsp.report.checks import by_name
from mtmc_lsp.report.phrases import (
    headline,
    model_line,
    pair_headline,
    ratio_text,
    recording_summary,
    report_lines,
    stage_with_time,
    timing_line,
    timing_notes,
    verdict_line,
)
from mtmc_lsp.search.store import RunRecord

STYLE = {StepStatus.ACCEPTED: "green", StepStatus.REJECTED: "yellow", StepStatus.FAILED: "red"}
MARK = {StepStatus.ACCEPTED: "✓", StepStatus.REJECTED: "-", StepStatus.FAILED: "✗"}
CHECK_MARK = {
    CheckStatus.PASSED: ("✓", "green"),
    CheckStatus.FAILED: ("✗", "red"),
    CheckStatus.SKIPPED: ("-", "yellow"),
}
FILE_WIDTH = 200
"""Width in columns of tables written to a file or a pipe."""
MAX_CALLS = 3
"""Maximum number of call variants shown per recorded target."""
DIFF_STYLE = {"+": "green", "-": "red", "@": "cyan"}


def console(*, stderr: bool = False) -> Console:
    """Console for text output. Lines are never wrapped or truncated, so code can be copied and logs searched."""
    out = Console(stderr=stderr, soft_wrap=True, highlight=False)
    if not out.is_terminal:
        out.width = FILE_WIDTH
    return out


def show_head(out: Console, capture: Capture) -> None:
    """Show the target, the machine and the workload."""
    env, workload = capture.environment, capture.workload
    sizes = "".join(f", {name}={size}" for name, size in capture.graph.sizes.items())
    out.print(Text(workload.target.title, style="bold"), f" {len(capture.graph.nodes)} operations{sizes}")
    device = env.gpu or "no CUDA GPU: steps are verified by Triton's interpreter and not timed"
    line = f"  {device}; torch {env.torch}, triton {env.triton}; workload from {workload.source.value}"
    out.print(Text(line, style="dim"))


@dataclass(frozen=True)
class RunClock:
    """The present stage of a run, the time that it has taken, and the time that is left; current whenever it is drawn."""

    stage: str
    began: float
    """Time of the monotonic clock."""
    budget: float
    """Seconds."""

    def __rich__(self) -> Text:
        return Text(stage_with_time(self.stage, time.monotonic() - self.began, self.budget))


def show_start(out: Console, name: str, path: Path, budget: float) -> None:
    """Show what begins, at once: the capture that follows takes seconds."""
    out.print(Text(f"optimizing {name} in {path.name}, at most {budget:.0f} s", style="dim"))


def _show_action(out: Console, step: Step) -> None:
    """Show headline and reason of a step."""
    rounding = "  (changes rounding, within the error budget)" if step.action.changes_rounding else ""
    out.print()
    out.print(Text(f"Step {step.index}  {step.action.text}{rounding}", style="bold"))
    out.print(Text(f"  {step.action.rationale}", style="dim"))


def show_step(out: Console, step: Step, *, diff: bool) -> None:
    """Show a step and its result."""
    _show_action(out, step)
    if diff and step.diff and step.status is not StepStatus.FAILED:
        out.print(coloured(step.diff))
    if step.verdict is not None:
        out.print(Text(f"  {verdict_line(step.verdict)}"))
        for note in step.verdict.notes:
            out.print(Text(f"    {note}", style="dim"))
    if step.report is not None:
        for line in report_lines(step.report):
            out.print(Text(f"    {line}", style="dim"))
    if step.timing is not None:
        show_timing(out, step.timing)
    out.print(Text(f"  {MARK[step.status]} {step.status.value}: {step.reason}", style=STYLE[step.status]))


def show_questions(out: Console, questions: Sequence[Question]) -> None:
    """Show the prompts for a model."""
    for question in questions:
        for message in question.messages:
            out.print(Text(f"--- {question.purpose}: {message.role}", style="bold"))
            out.print(Text(message.content))
    if not questions:
        out.print("no prompts: there is no legal action to choose from")


def show_replayed(out: Console, step: Step) -> None:
    """Show a step that an earlier, unfinished run has already tried."""
    out.print(Text(f"Step {step.index}  {step.action.text}: {step.status.value} before", style="dim"))


def show_withdrawn(out: Console, step: Step) -> None:
    """Show an accepted step that was withdrawn at the end of the run."""
    out.print(Text(f"Step {step.index}  withdrawn: {step.reason}", style=STYLE[step.status]))


def show_retimed(out: Console, step: Step) -> None:
    """Show the times of the last accepted step against baselines that were not ready before."""
    if step.timing is not None:
        out.print(Text(f"Step {step.index}  against all baselines", style="bold"))
        out.print(timing_table(step.timing))


def coloured(diff: str) -> Text:
    """A unified diff with colours."""
    text = Text()
    for line in diff.splitlines():
        style = "bold" if line.startswith(("+++", "---")) else DIFF_STYLE.get(line[:1], "")
        text.append(f"{line}\n", style=style)
    return text


def show_timing(out: Console, timing: Timing) -> None:
    """Show the times compared with each baseline, and how reliable they are."""
    out.print(timing_table(timing))
    for line in (timing_line(timing), *timing_notes(timing)):
        out.print(Text(f"  {line}", style="dim"))


def timing_table(timing: Timing) -> RenderableType:
    """Times and speedups over each baseline."""
    table = Table(box=None, padding=(0, 2), show_edge=False)
    table.add_column("  baseline")
    table.add_column("time", justify="right")
    table.add_column("speedup", justify="right")
    for baseline in timing.baselines:
        time = f"{baseline.median_us:.1f} us" if baseline.speedup else baseline.note
        table.add_row(f"  {baseline.name}", time, ratio_text(baseline.speedup))
    return table


def show_plan(out: Console, actions: list[MacroAction], device: DeviceModel, assumed: Sequence[str]) -> None:
    """Show the assumptions about the workload, and the possible first actions, best first."""
    for note in assumed:
        out.print(Text(note, style="dim"))
    if not actions:
        out.print("no action is predicted to be worth trying")
        return
    kind = "measured ceilings" if device.is_calibrated else "no GPU on this machine"
    out.print(Text(f"Estimates for {device.title}, {kind}; nothing was run.", style="dim"))
    if device.note:
        out.print(Text(f"Note: {device.note}.", style="dim"))
    for number, action in enumerate(actions, 1):
        out.print()
        saved = f" about {action.expected.saved_us:.0f} us saved (estimate)"
        out.print(Text(f"{number}. {action.text}", style="bold"), Text(saved, style="dim"))
        out.print(Text(f"   {action.rationale}", style="dim"))


def show_result(out: Console, result: RunResult) -> None:
    """Show the result of a run."""
    accepted = sum(step.status is StepStatus.ACCEPTED for step in result.steps)
    succeeded = result.status in (RunStatus.IMPROVED, RunStatus.UNMEASURED)
    out.print()
    out.print(Text(headline(result), style="bold green" if succeeded else "bold"))
    line = f"  {accepted} of {len(result.steps)} steps accepted in {result.seconds:.0f} s, run {result.id}"
    out.print(Text(line, style="dim"))
    if result.model_use is not None:
        out.print(Text(f"  {model_line(result.model_use)}", style="dim"))
    for note in result.workload.assumed:
        out.print(Text(f"  {note}", style="dim"))
    if result.offer is not None:
        out.print(Text("  torch.compile instead of the kernels, which is not applied:", style="bold"))
        out.print(coloured(result.offer.diff))


def show_recording(out: Console, recording: Recording) -> None:
    """Show the recorded calls, most frequent first."""
    out.print()
    for target in recording.targets:
        name = f"{Path(target.path).name}::{target.qualname}"
        out.print(Text(name, style="bold"), Text(f" {recording_summary(target)}", style="dim"))
        for call in target.calls[:MAX_CALLS]:
            out.print(Text(f"  {call.count:6}  {call.directive if not call.unusable else call.unusable}"))
        if len(target.calls) > MAX_CALLS or target.others:
            out.print(Text(f"          and {target.count - sum(c.count for c in target.calls[:MAX_CALLS])} more"))
    if recording.exit_code:
        out.print(f"the command ended with exit code {recording.exit_code}; the calls before that are kept")
    if any(target.calls for target in recording.targets):
        out.print("these calls are the workload of targets without a directive: mtmc optimize FILE::NAME")
    elif recording.targets:
        out.print(
            "no inputs were recorded: run the program without torch.compile once, or describe them in a directive"
        )
    elif not recording.python_seen:
        out.print("nothing was recorded: no Python ran, or it was started with -E, -I or -S")
    else:
        out.print("nothing was recorded: no function of this project was called with a tensor")


def runs_table(records: Sequence[RunRecord]) -> Table:
    """Table of a project's runs."""
    table = Table("run", "target", "status", "steps", "started", box=None, padding=(0, 2))
    for record in records:
        started = datetime.datetime.fromtimestamp(record.started).strftime("%Y-%m-%d %H:%M")
        status = "unfinished" if record.status is RunStatus.RUNNING else record.status.value
        name = f"{Path(record.path).name}::{record.qualname}"
        table.add_row(record.id, name, status, str(record.steps), started)
    return table


def show_pair(out: Console, pair: ForeignVerdict) -> None:
    """Show a pair's verdict: all checks with their numbers of cases, the verdict, and the timing."""
    verdict = pair.verdict
    table = Table("", "check", "cases", "", box=None, padding=(0, 1))
    for group in by_name(verdict.checks):
        mark, style = CHECK_MARK[group.worst]
        table.add_row(Text(mark, style), group.name, group.counts, Text(group.detail))
    out.print(table)
    for note in verdict.notes:
        out.print(Text(f"  {note}", style="dim"))
    style = "bold green" if verdict.is_correct else "bold red"
    out.print(Text(verdict_line(verdict), style=style))
    if pair.timing is not None:
        show_timing(out, pair.timing)
        out.print(Text(f"{pair.speed}: {pair_headline(pair.timing)}", style="bold"))
    elif verdict.is_correct:
        out.print(f"unmeasured: {pair.untimed}")
    if pair.reproduction:
        out.print(f"  to reproduce: python {pair.reproduction}")


def show_guard(out: Console, name: str, report: GuardReport) -> None:
    """Show for each known call whether the kernels run, and else the reason and the condition."""
    refused = sum(not call.kernels_run for call in report.calls)
    summary = f"the kernels run for {len(report.calls) - refused} of {len(report.calls)} known calls"
    out.print(Text(f"{name}: {summary}", style="bold"))
    for call in report.calls:
        mark, style = CHECK_MARK[CheckStatus.PASSED if call.kernels_run else CheckStatus.FAILED]
        out.print(Text(mark, style), Text(f"{call.name}: {call.reason or 'the kernels run'}"))
        if call.condition:
            out.print(Text(f"    {call.guard}: {call.condition}", style="dim"))
    for note in report.notes:
        out.print(Text(f"  {note}", style="dim"))


def findings_table(findings: Sequence[Finding]) -> Table:
    """Results of the environment checks, with remedies for missing items."""
    table = Table("", "item", "status", box=None, padding=(0, 1))
    for finding in findings:
        mark = Text("✓", "green") if finding.ok else Text("✗", "red") if finding.required else Text("-", "yellow")
        remedy = f"\n{finding.remedy}" if finding.remedy and not finding.ok else ""
        table.add_row(mark, finding.name, finding.detail + remedy)
    return table
