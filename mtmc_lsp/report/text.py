"""Text output for a terminal."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from mtmc_lsp.actions.base import lines_text
from mtmc_lsp.app.backends import Question
from mtmc_lsp.app.doctor import Finding
from mtmc_lsp.app.record import Recording
from mtmc_lsp.app.target_file import ListedTarget
from mtmc_lsp.app.why import GuardReport
from mtmc_lsp.core.action import MacroAction
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.results import CheckStatus, Timing
from mtmc_lsp.core.run import RunStatus
from mtmc_lsp.measure.foreign_candidate import ForeignVerdict
from mtmc_lsp.report.checks import by_name
from mtmc_lsp.report.console import short_path, show
from mtmc_lsp.report.phrases import (
    joined,
    launch_text,
    launches_summary,
    pair_headline,
    peak_of,
    ratio_text,
    recording_summary,
    timing_line,
    timing_notes,
    verdict_line,
)
from mtmc_lsp.search.store import RunRecord

CHECK_MARK = {
    CheckStatus.PASSED: ("✓", "green"),
    CheckStatus.FAILED: ("✗", "red"),
    CheckStatus.SKIPPED: ("-", "yellow"),
}
CHECK_LINES = 2
"""Maximum number of lines for the names of the checks that passed."""
MAX_CALLS = 3
"""Maximum number of call variants shown per recorded target."""
DIFF_STYLE = {"+": "green", "-": "red", "@": "cyan"}


def show_questions(out: Console, questions: Sequence[Question]) -> None:
    """Show the prompts for a model."""
    for question in questions:
        for message in question.messages:
            out.print(Text(f"--- {question.purpose}: {message.role}", style="bold"))
            out.print(Text(message.content), soft_wrap=True)
    if not questions:
        out.print("no prompts: there is no legal action to choose from")


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
        show(out, line, style="dim", indent=2)


def timing_table(timing: Timing) -> RenderableType:
    """Times, speedups over each baseline, and peak memory of a call."""
    table = Table(box=None, padding=(0, 2), show_edge=False)
    table.add_column("  baseline")
    table.add_column("time", justify="right")
    table.add_column("speedup", justify="right")
    table.add_column("peak memory", justify="right")
    for baseline in timing.baselines:
        time = f"{baseline.median_us:.1f} us" if baseline.speedup else baseline.note
        table.add_row(f"  {baseline.name}", time, ratio_text(baseline.speedup), peak_of(baseline.peak_bytes))
    table.add_row("  this version", f"{timing.median_us:.1f} us", "", peak_of(timing.peak_bytes))
    return table


def show_plan(out: Console, actions: list[MacroAction], device: DeviceModel, assumed: Sequence[str]) -> None:
    """Show the assumptions about the workload, and the possible first actions, best first."""
    for note in assumed:
        show(out, note, style="dim")
    if not actions:
        show(out, "no action is predicted to be worth trying")
        return
    kind = "measured ceilings" if device.is_calibrated else "no GPU on this machine"
    show(out, f"Estimates for {device.title}, {kind}; nothing was run.", style="dim")
    if device.note:
        show(out, f"Note: {device.note}.", style="dim")
    for number, action in enumerate(actions, 1):
        out.print()
        saved = f"  in {lines_text(action.lines)}, about {action.expected.saved_us:.0f} us saved (estimate)"
        show(out, Text.assemble((action.text, "bold"), (saved, "dim")), first=f"{number}. ")
        show(out, action.rationale, style="dim", indent=3)


def show_targets(out: Console, file: str, targets: Sequence[ListedTarget], *, numbered: bool = False) -> None:
    """Show each target with its line and the origin of its example inputs."""
    show(out, f"Targets in {file}:", style="bold")
    width = max(len(item.name) for item in targets)
    for number, item in enumerate(targets, 1):
        first = f"{number:>3}. " if numbered else "  "
        state = f"inputs from {item.inputs}" if item.is_ready else "no example inputs yet"
        first = f"{first}{item.name:<{width}}  "
        show(out, Text(f"line {item.line}, {state}", style="" if item.is_ready else "dim"), first=first)


def show_recording(out: Console, recording: Recording) -> None:
    """Show the recorded calls, most frequent first."""
    out.print()
    for target in recording.targets:
        name = f"{Path(target.path).name}::{target.qualname}"
        out.print(Text(name, style="bold"), Text(f" {recording_summary(target)}", style="dim"))
        for call in target.calls[:MAX_CALLS]:
            # A directive stays one line, so that it can be copied.
            call_text = call.directive if not call.unusable else call.unusable
            out.print(Text(f"  {call.count:6}  {call_text}"), soft_wrap=True)
        if len(target.calls) > MAX_CALLS or target.others:
            out.print(Text(f"          and {target.count - sum(c.count for c in target.calls[:MAX_CALLS])} more"))
    for kernel in recording.kernels:
        name = f"{Path(kernel.path).name}::{kernel.qualname}"
        out.print(Text(name, style="bold"), Text(f" {launches_summary(kernel)}", style="dim"))
        for launch in kernel.launches[:MAX_CALLS]:
            out.print(Text(f"  {launch.count:6}  {launch_text(launch)}"), soft_wrap=True)
    if recording.exit_code:
        show(out, f"the command ended with exit code {recording.exit_code}; the calls before that are kept")
    if any(target.calls for target in recording.targets):
        show(out, "these calls are the workload of targets without a directive: mtmc optimize FILE::NAME")
    elif recording.kernels:
        show(out, "these launches are the workload of kernels without another one: mtmc optimize FILE::KERNEL")
    elif recording.targets:
        show(
            out, "no inputs were recorded: run the program without torch.compile once, or describe them in a directive"
        )
    elif not recording.python_seen:
        show(out, "nothing was recorded: no Python ran, or it was started with -E, -I or -S")
    else:
        show(out, "nothing was recorded: no function of this project was called with a tensor")


def runs_table(records: Sequence[RunRecord]) -> Table:
    """Table of a project's runs."""
    table = Table("run", "target", "status", "steps", "started", box=None, padding=(0, 2))
    for record in records:
        started = datetime.datetime.fromtimestamp(record.started).strftime("%Y-%m-%d %H:%M")
        status = "unfinished" if record.status is RunStatus.RUNNING else record.status.value
        name = f"{Path(record.path).name}::{record.qualname}"
        table.add_row(record.id, name, status, str(record.steps), started)
    return table


def show_pair(out: Console, pair: ForeignVerdict, *, verbose: bool) -> None:
    """Show a pair's verdict, the checks that failed or could not run, and the timing; every check if ``verbose``."""
    verdict, groups = pair.verdict, by_name(pair.verdict.checks)
    show(out, verdict_line(verdict), style="bold green" if verdict.is_correct else "bold red")
    for group in groups:
        mark, style = CHECK_MARK[group.worst]
        if verbose or group.worst is CheckStatus.FAILED:
            show(out, joined((group.counts, group.detail)), first=Text.assemble((mark, style), f" {group.name}  "))
    if not verbose:
        for status, word in ((CheckStatus.PASSED, "passed"), (CheckStatus.SKIPPED, "could not run")):
            names = [group.name for group in groups if group.worst is status]
            if names:
                mark, style = CHECK_MARK[status]
                first = Text.assemble((mark, style), f" {word}: ")
                show(out, ", ".join(names), style="dim", first=first, lines=CHECK_LINES)
    for note in verdict.notes:
        show(out, note, style="dim", indent=2)
    if pair.timing is not None:
        show_timing(out, pair.timing)
        show(out, f"{pair.speed}: {pair_headline(pair.timing)}", style="bold")
    elif verdict.is_correct:
        show(out, f"unmeasured: {pair.untimed}")
    if pair.reproduction:
        show(out, f"to reproduce: python {short_path(pair.reproduction)}")
    if not verbose and groups:
        show(out, "every check by itself: add -v", style="dim")


def show_guard(out: Console, name: str, report: GuardReport) -> None:
    """Show for each known call whether the kernels run, and else the reason and the condition."""
    refused = sum(not call.kernels_run for call in report.calls)
    summary = f"the kernels run for {len(report.calls) - refused} of {len(report.calls)} known calls"
    show(out, f"{name}: {summary}", style="bold")
    for call in report.calls:
        mark, style = CHECK_MARK[CheckStatus.PASSED if call.kernels_run else CheckStatus.FAILED]
        show(out, f"{call.name}: {call.reason or 'the kernels run'}", first=Text.assemble((mark, style), " "))
        if call.condition:
            show(out, f"{call.guard}: {call.condition}", style="dim", indent=4)
    for note in report.notes:
        show(out, note, style="dim", indent=2)


def show_finding(out: Console, finding: Finding, width: int) -> None:
    """Show the result of one check of the environment, and the remedy if something is missing.

    Args:
        width: columns for the names of the checks.
    """
    mark = Text("✓", "green") if finding.ok else Text("✗", "red") if finding.required else Text("-", "yellow")
    show(out, finding.detail or "none", first=Text.assemble(mark, f" {finding.name:<{width}}  "))
    if finding.remedy and not finding.ok:
        # A command stays one line, so that it can be copied.
        out.print(f"{' ' * (width + 4)}{finding.remedy}", soft_wrap=True)
