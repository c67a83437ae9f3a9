"""A run in the terminal: at most four lines a step and twelve at the end; details and diffs on request."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.text import Text

from mtmc_lsp.app.target_file import Written
from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.run import KEPT, RunResult, RunStatus, Step, StepStatus
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.report.console import LiveLine, short_path, show, show_commands
from mtmc_lsp.report.phrases import (
    best_line,
    headline,
    inputs_text,
    is_unfinished,
    joined,
    model_line,
    outcome_text,
    report_lines,
    step_counts,
    times_text,
    verdict_line,
)
from mtmc_lsp.report.search_tree import show_tree
from mtmc_lsp.report.text import coloured, show_timing

STYLE = {StepStatus.ACCEPTED: "green", StepStatus.REJECTED: "yellow", StepStatus.FAILED: "red"}
MARK = {StepStatus.ACCEPTED: "✓", StepStatus.REJECTED: "-", StepStatus.FAILED: "✗"}
STEP_LINES, TITLE_LINES = 4, 2
"""The most lines of a step, and of its title, unless details are wanted."""
HEADLINE_LINES, NOTES = 3, 2
"""The most lines of the outcome, and the most notes below it."""


@dataclass
class RunText:
    """Shows a run while it happens, or a stored one."""

    out: Console
    verbose: bool = False
    """Whether to show reasons, checks, times against each baseline, and registers."""
    diff: bool = False
    """Whether to show what each step changes."""
    line: LiveLine = field(default_factory=LiveLine)
    """What is shown while the run goes on."""
    _kept: set[int] = field(default_factory=set)
    """Numbers of the steps that were shown as kept."""
    _shown: set[str] = field(default_factory=set)
    """The compiler's statistics that were shown. Kernels that a step leaves alone are not shown again."""

    # While the run goes on ---------------------------------------------------------------------------------------

    def start(self, name: str, path: Path, budget: float) -> None:
        """Show what begins, at once: the capture that follows takes seconds."""
        self.line.began, self.line.budget = time.monotonic(), budget
        show(self.out, f"Optimizing {name} in {short_path(path)}, at most {budget:.0f} s")

    def note(self, note: str) -> None:
        """Show something that the user should know about the run."""
        show(self.out, note, style="yellow", indent=2)

    def trial(self, index: int, action: MacroAction) -> None:
        """The run tries a step."""
        self.line.trial = f"step {index}: {action.text}"

    def captured(self, capture: Capture) -> None:
        """Show the inputs and the machine."""
        env, workload = capture.environment, capture.workload
        device = env.gpu or "no GPU: steps are verified and compiled, not timed"
        place = (
            f"lines {workload.target.region.start_line} to {workload.target.region.end_line}"
            if workload.target.region
            else ""
        )
        show(
            self.out,
            joined((place, inputs_text(workload), *capture.settings.words, device)),
            style="dim",
            indent=2,
            lines=2,
        )
        if self.verbose:
            sizes = "".join(f", {name}={size}" for name, size in capture.graph.sizes.items())
            versions = f"torch {env.torch}, triton {env.triton}, inputs from {workload.source.value}"
            show(self.out, f"{len(capture.graph.nodes)} operations{sizes}; {versions}", style="dim", indent=2)

    def step(self, step: Step) -> None:
        """Show a step and its result."""
        self.line.trial = ""
        self._count(step)
        if step.status is StepStatus.ACCEPTED:
            self.line.best = best_line(step)
        used = self._title(step)
        if self.verbose:
            show(self.out, step.action.rationale, style="dim", indent=4)
        show(
            self.out,
            outcome_text(step),
            style=STYLE[step.status],
            indent=4,
            lines=None if self.verbose else STEP_LINES - used,
        )
        if self.verbose:
            self._details(step)
        if self.diff and step.diff and step.status is not StepStatus.FAILED:
            self.out.print(coloured(step.diff), soft_wrap=True)

    def _title(self, step: Step, suffix: str = "") -> int:
        """Show the title of a step; returns its number of lines."""
        first = Text.assemble((f"{MARK[step.status]} ", STYLE[step.status]), (f"Step {step.index}  ", "bold"))
        return show(self.out, Text(f"{step.action.text}{suffix}", style="bold"), first=first, lines=TITLE_LINES)

    def _details(self, step: Step) -> None:
        if step.verdict is not None:
            show(self.out, verdict_line(step.verdict), indent=4)
            for note in step.verdict.notes:
                show(self.out, note, style="dim", indent=6)
        for line in report_lines(step.report) if step.report is not None else ():
            if line not in self._shown:
                show(self.out, line, style="dim", indent=6)
            self._shown.add(line)
        if step.timing is not None:
            show_timing(self.out, step.timing)

    def replayed(self, step: Step) -> None:
        """Show a step that an earlier, unfinished run has already tried."""
        self._count(step)
        if step.status is StepStatus.ACCEPTED:
            self.line.best = best_line(step)
        self._title(step, f": {step.status.value} before")

    def withdrawn(self, step: Step) -> None:
        """Show an accepted step that was withdrawn at the end of the run."""
        self._count(step)
        show(self.out, f"Step {step.index} is withdrawn: {step.reason}", style=STYLE[step.status], lines=2)

    def switched(self, step: Step) -> None:
        """Show that a step joined or left the path to the fastest version, or failed its verification."""
        if step.status is StepStatus.ACCEPTED:
            self.line.best = best_line(step)
            text = f"Step {step.index} is kept: its branch is the fastest"
        elif not step.is_alternative:
            text = f"Step {step.index} is withdrawn: {step.reason}"
        elif step.index in self._kept:
            text = f"Step {step.index} is set aside: another branch is faster"
        else:
            # Its verification ended, and it stays on another branch.
            return
        self._count(step)
        show(self.out, text, style=STYLE[step.status], lines=2)

    def _count(self, step: Step) -> None:
        if step.status is StepStatus.ACCEPTED:
            self._kept.add(step.index)
        else:
            self._kept.discard(step.index)

    def retimed(self, step: Step) -> None:
        """Show the times of the last accepted step against baselines that were not ready before."""
        self.line.best = best_line(step)
        if step.timing is not None and self.verbose:
            show(self.out, f"Step {step.index}  against all baselines", style="bold")
            show_timing(self.out, step.timing)

    # At the end --------------------------------------------------------------------------------------------------

    def result(self, result: RunResult) -> None:
        """Show the outcome of a run."""
        lines = None if self.verbose else HEADLINE_LINES
        self.out.print()
        show(self.out, headline(result), style="bold green" if result.status in KEPT else "bold", lines=lines)
        if times := times_text(result):
            show(self.out, joined((times, inputs_text(result.workload))), indent=2, lines=1)
        counts = joined((step_counts(result.steps), f"{result.seconds:.0f} s", f"run {result.id}"))
        show(self.out, counts, style="dim", indent=2, lines=1)
        if result.end_reason:
            show(self.out, f"The search ended: {result.end_reason}", style="dim", indent=2, lines=1)
        if self.verbose:
            show_tree(self.out, result.steps)
        if result.model_use is not None:
            show(self.out, model_line(result.model_use), style="dim", indent=2, lines=1)
        for note in result.workload.assumed[: None if self.verbose else NOTES]:
            show(self.out, note, style="dim", indent=2, lines=None if self.verbose else 1)
        if result.offer is not None:
            where = "below" if self.diff else "with --diff"
            text = f"@torch.compile instead of the kernels is not written; it is shown {where}"
            show(self.out, text, indent=2, lines=1)
            if self.diff:
                self.out.print(coloured(result.offer.diff), soft_wrap=True)

    def next_commands(self, result: RunResult, *, applied: bool) -> None:
        """Show the commands that continue from here."""
        spec = f"{short_path(result.target.path)}::{result.target.qualname}"
        page = (f"mtmc report {result.id} --html run.html", "diffs, checks, times as a page")
        if is_unfinished(result):
            # Four times the time that was too short, in hundreds of seconds.
            budget = 100 * max(1, math.ceil(result.seconds * 4 / 100))
            show_commands(self.out, [page, (f"mtmc optimize {spec} --budget {budget}", "with more time")])
        elif result.status is RunStatus.NO_GAIN:
            show_commands(self.out, [page, (f"mtmc profile {spec}", "where the time of a call goes")])
        elif result.status not in KEPT:
            show_commands(self.out, [page])
        else:
            write = (f"mtmc apply {result.id}", "write the kernels into the file")
            why = (f"mtmc why {spec}", "whether the kernels run")
            if any(step.action.kind is ActionKind.EDIT for step in result.steps):
                write = (f"mtmc apply {result.id}", "write the edits into the file")
                why = (f"mtmc undo {result.id}", "take the edits out of the file again")
            show_commands(self.out, [page, why] if applied else [write, page, why])


def show_written(out: Console, path: Path, written: Written) -> None:
    """Show which files were written, and where the text before is."""
    files = short_path(path) if written.kernels is None else f"{short_path(path)} and {written.kernels.name}"
    show(out, f"written to {files}; the text before is in {short_path(written.backup)}", indent=2)
