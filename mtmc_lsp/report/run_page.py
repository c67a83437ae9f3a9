"""A run as a page, used by ``mtmc report --html`` and the editor's panel.

The page answers in this order: what got faster, by how much, on which inputs and GPU; what to do next; what each step does;
times, roofline and memory; what was tried and rejected; how each step was verified.
"""

from __future__ import annotations

import datetime
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mtmc_lsp.core.chat import Exchange
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.results import Verdict, Work
from mtmc_lsp.core.run import KEPT, RunResult, Step, StepStatus
from mtmc_lsp.core.workload import Environment
from mtmc_lsp.report.charts import Gain, Traffic, amount, traffic, waterfall
from mtmc_lsp.report.checks import by_name
from mtmc_lsp.report.page import Page, diff_block, escape, figure, folded, table
from mtmc_lsp.report.phrases import (
    headline,
    inputs_text,
    microseconds,
    model_line,
    outcome_text,
    peak_of,
    ratio_text,
    report_lines,
    step_counts,
    times_text,
    timing_notes,
    verdict_line,
)
from mtmc_lsp.report.roofline_chart import Point, roofline
from mtmc_lsp.report.search_tree import tree_picture
from mtmc_lsp.search.stored_run import StoredRun

GAINS, TRAFFIC, ROOFLINE = "gains", "traffic", "roofline"
"""Figure names."""
ESTIMATED = "Bytes and operations are estimates of the cost model"
RAISED = (
    "more memory than the version before, and the call got faster all the same: the measured time of the whole call decides, "
    "and arithmetic or launches that are saved can be worth more than the traffic."
)
"""Why a step that raises the traffic was accepted."""
IN_THE_EDITOR = (
    "In the editor, the line above the function has the commands: <b>Keep</b> writes a pending step into the file, "
    "<b>Discard</b> drops it, and <b>Undo</b> takes a kept step out again. The other steps stay."
)
LEAST_RISE = 1.005
"""Ratio of traffic from which a step is called out."""


@dataclass(frozen=True)
class RunPage:
    """Data for the page of a run, finished or not."""

    run: str
    path: str
    target: str
    started: float
    """Seconds since the epoch."""
    steps: Sequence[Step]
    environment: Environment | None
    result: RunResult | None = None
    """``None`` while the run is active, or if it was interrupted."""
    exchanges: Sequence[Exchange] = ()
    kept_steps: frozenset[int] | None = None
    """Indices of the steps that the user's file contains, for a page in an editor; ``None`` for other pages."""
    resume_command: str = ""
    """Continues an unfinished run; empty for the usual command."""

    @property
    def accepted(self) -> list[Step]:
        """The accepted steps, in order."""
        return [step for step in self.steps if step.status is StepStatus.ACCEPTED]

    def page(self) -> Page:
        """Build the page."""
        charts = [chart for chart in (self._speedups(), self._roofline()) if chart is not None]
        sections = [self._head(), self._next(), self._accepted_steps(), self._times()]
        sections += [f"<h2>{escape(title)}</h2>{figure(name, caption)}" for title, name, _, caption in charts]
        sections += [self._memory(), tree_picture(self.steps), self._rejected(), self._verification(), self._ledger()]
        sections.append(self._environment())
        specs = {name: spec for _, name, spec, _ in charts}
        return Page(f"{self.target}: run {self.run}", "\n".join(part for part in sections if part), specs)

    # What got faster, and what to do -----------------------------------------------------------------------------

    def _head(self) -> str:
        summary = headline(self.result) if self.result is not None else "This run is not finished."
        last = self.accepted[-1] if self.accepted else None
        facts = [times_text(self.result) if self.result is not None else ""]
        if self.result is not None:
            facts.append(f"inputs: {inputs_text(self.result.workload)}")
        if self.environment is not None:
            facts.append(self.environment.gpu or "no GPU")
        verified = verdict_line(last.verdict) if last is not None and last.verdict is not None else ""
        assumed = self.result.workload.assumed if self.result is not None else ()
        lines = [f"<header><h1>{escape(self.target)}</h1>", f'<p class="headline">{escape(summary)}</p>']
        lines += [f"<p>{escape(line)}</p>" for line in (" · ".join(fact for fact in facts if fact), verified) if line]
        lines += [f'<p class="quiet">{escape(note)}</p>' for note in assumed]
        if self.result is not None and self.result.end_reason:
            lines.append(f'<p class="quiet">{escape(f"The search ended: {self.result.end_reason}.")}</p>')
        notes = self.result.notes if self.result is not None else ()
        lines += [f'<p class="quiet">{escape(note)}</p>' for note in notes]
        when = datetime.datetime.fromtimestamp(self.started, datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
        origin = " · ".join((self.path, f"run {self.run}", when, self._step_counts()))
        return "\n".join([*lines, f'<p class="quiet">{escape(origin)}</p>', "</header>"])

    def _step_counts(self) -> str:
        if self.kept_steps is None:
            return step_counts(self.steps)
        count = len(self.accepted)
        return f"{count} {'step' if count == 1 else 'steps'}, {len(self.kept_steps)} of them in the file"

    def _next(self) -> str:
        spec, run = shlex.quote(f"{self.path}::{self.target}"), self.run
        items: list[tuple[str, str]] = []
        if self.result is None:
            items.append((self.resume_command or f"mtmc optimize --resume {run}", "continues the run"))
        elif self.result.status not in KEPT:
            items.append((f"mtmc profile {spec}", "shows where the time of a call goes"))
        else:
            if self.kept_steps is None:
                items.append((f"mtmc apply {run}", "writes the kernels into your file"))
            items.append((f"mtmc why {spec}", "says whether the kernels run for your calls, and what refuses them"))
            items.append((f"mtmc export {run} --out kernels.py", "writes the version as a file of its own"))
        lines = [f"<li><code>{escape(command)}</code> {escape(effect)}</li>" for command, effect in items]
        if self.kept_steps is not None and self.accepted:
            lines.insert(0, f"<li>{IN_THE_EDITOR}</li>")
        if self.result is not None and self.result.status in KEPT:
            lines.append(
                "<li>Only calls without gradients (<code>torch.no_grad()</code> or "
                "<code>torch.inference_mode()</code>) use the kernels; your own code runs otherwise.</li>"
            )
        offer = self.result.offer if self.result is not None else None
        shown = (
            folded("torch.compile instead of the kernels, which is not applied", diff_block(offer.diff))
            if offer
            else ""
        )
        return f"<h2>What to do next</h2>\n<ul>{''.join(lines)}</ul>\n{shown}"

    # Steps -------------------------------------------------------------------------------------------------------

    def _accepted_steps(self) -> str:
        if not self.accepted:
            return "<h2>Steps</h2>\n<p>No step was accepted.</p>" if self.steps else "<p>No step was tried.</p>"
        # Steps of one kind have one reason, which is shown once.
        reasons = [step.action.rationale for step in self.accepted]
        parts = [
            self._step(step, "" if step.action.rationale in reasons[:number] else step.action.rationale)
            for number, step in enumerate(self.accepted)
        ]
        return "\n".join(["<h2>Steps</h2>", *parts])

    def _step(self, step: Step, reason: str) -> str:
        state = ""
        if self.kept_steps is not None:
            state = f' <span class="state">{"kept" if step.index in self.kept_steps else "pending"}</span>'
        added = sum(line.startswith("+") and not line.startswith("+++") for line in step.diff.splitlines())
        removed = sum(line.startswith("-") and not line.startswith("---") for line in step.diff.splitlines())
        count = f"Diff: {added} lines added, {removed} removed"
        return "\n".join(
            [
                f'<section class="step" id="step-{step.index}"><h3>{step.index}. {escape(step.action.text)}{state}</h3>',
                f"<p>{escape(outcome_text(step))}</p>",
                f'<p class="quiet">{escape(reason)}</p>' if reason else "",
                folded(count, diff_block(step.diff)) if step.diff else "",
                "</section>",
            ]
        )

    def _rejected(self) -> str:
        rows = [
            (step.index, step.action.text, step.status.value, outcome_text(step))
            for step in self.steps
            if step.status is not StepStatus.ACCEPTED
        ]
        if not rows:
            return ""
        head, classes = ("", "Step", "", "Reason"), ("number", "name", "word", "sentence")
        return f"<h2>Tried and rejected</h2>\n{table(head, rows, classes=classes)}"

    # Times, roofline and memory ----------------------------------------------------------------------------------

    def _times(self) -> str:
        timed = [(step, step.timing) for step in self.accepted if step.timing is not None]
        if not timed:
            return ""
        rows = [
            (
                _name(step),
                microseconds(timing.median_us),
                ratio_text(timing.against("eager")),
                ratio_text(timing.against("compile")),
                f"{timing.roofline:.0%}",
                peak_of(timing.peak_bytes),
            )
            for step, timing in timed
        ]
        last = timed[-1][1]
        base = [
            (
                f"your code, {baseline.name}",
                microseconds(baseline.median_us) if baseline.speedup else baseline.note,
                "",
                "",
                "",
                peak_of(baseline.peak_bytes),
            )
            for baseline in last.baselines
            if baseline.name != "previous"
        ]
        head = ("Version", "Time", "over eager mode", "over torch.compile", "roofline", "peak memory")
        body = table(head, [*base, *rows], classes=("name", *["number"] * 5))
        notes = "".join(f"<li>{escape(note)}</li>" for note in timing_notes(last))
        return f"<h2>Times</h2>\n{body}" + (f'\n<ul class="quiet">{notes}</ul>' if notes else "")

    def _speedups(self) -> tuple[str, str, dict[str, object], str] | None:
        """Title, name, specification and caption of the chart of speedups; of memory traffic if nothing was timed."""
        gains, baseline = self._gains()
        if gains:
            caption = "Each bar shows the speedup before and after the step; lines are 95 % intervals."
            return "Speedup step by step", GAINS, waterfall(gains, baseline), caption
        steps = self._traffic()
        if not steps:
            return None
        caption = f"{ESTIMATED}. Nothing was timed: times and speedups need a GPU."
        return "Memory traffic step by step, estimated", TRAFFIC, traffic(steps), caption

    def _roofline(self) -> tuple[str, str, dict[str, object], str] | None:
        points, device = self._points()
        if not points or device is None:
            return None
        if any(point.seconds is not None for point in points):
            caption = (
                f"{ESTIMATED}; times were measured. A version at its ceiling cannot be faster with this arithmetic. "
                "The ceiling of a version is the slowest arithmetic unit that reaches its rate."
            )
        else:
            caption = f"{ESTIMATED}; nothing was timed, so each version is shown at its upper bound."
        return "Roofline", ROOFLINE, roofline(points, device), caption

    def _gains(self) -> tuple[list[Gain], str]:
        """Speedup after each timed step, over the best baseline of the last one."""
        timed = [(step, step.timing) for step in self.accepted if step.timing is not None]
        best = timed[-1][1].best if timed else ""
        gains: list[Gain] = []
        for step, timing in timed:
            ratio = timing.against(best)
            if ratio is not None:
                gains.append(
                    Gain(f"step {step.index}", step.action.text, gains[-1].after.ratio if gains else 1.0, ratio)
                )
        return gains, best

    def _traffic(self) -> list[Traffic]:
        before = self.result.work if self.result is not None else None
        steps = []
        for step in self.accepted:
            if step.work is not None and before is not None and before.bytes > 0:
                steps.append(Traffic(f"step {step.index}", step.action.text, before.bytes, step.work.bytes))
            before = step.work
        return steps

    def _memory(self) -> str:
        """The estimated traffic of each version, and why a step that raises it was accepted."""
        steps = self._traffic()
        if not steps:
            return ""
        rows = [
            (
                f"{item.name}: {item.title}",
                amount(item.before, "B"),
                amount(item.after, "B"),
                f"{item.after / item.before - 1:+.0%}",
            )
            for item in steps
        ]
        raised = [item.name.removeprefix("step ") for item in steps if item.after > item.before * LEAST_RISE]
        timed = any(step.timing is not None for step in self.accepted)
        which = f"Step {raised[0]} moves" if len(raised) == 1 else f"Steps {', '.join(raised)} move"
        why = f"<p>{escape(f'{which} {RAISED}')}</p>" if timed and raised else ""
        head, classes = ("Step", "before", "after", "change"), ("name", "number", "number", "number")
        caption = f'<p class="quiet">{escape(ESTIMATED)}: reads and writes of GPU memory per call.</p>'
        return f"<h2>Memory traffic</h2>\n{table(head, rows, classes=classes)}\n{why}{caption}"

    def _points(self) -> tuple[list[Point], DeviceModel | None]:
        if self.result is None or self.result.device is None:
            return [], None
        eager = next((b.median_us for b in self.result.baselines if b.name == "eager" and b.speedup), None)
        versions: list[tuple[str, Work | None, float | None]] = [("your code", self.result.work, eager)]
        for step in self.accepted:
            versions.append((f"step {step.index}", step.work, step.timing.median_us if step.timing else None))
        points = [
            Point(name, work.flops, work.bytes, median / 1e6 if median is not None else None)
            for name, work, median in versions
            if work is not None
        ]
        return points, self.result.device

    # Details -----------------------------------------------------------------------------------------------------

    def _verification(self) -> str:
        verified = [(step, step.verdict) for step in self.steps if step.verdict is not None]
        parts = [_checks(step, verdict) for step, verdict in verified]
        return "\n".join(["<h2>Verification</h2>", *(parts or ["<p>No step reached verification.</p>"])])

    def _ledger(self) -> str:
        if not self.exchanges:
            return ""
        rows = [
            (
                number,
                e.purpose,
                e.model,
                _tokens(e.prompt_tokens, e),
                _tokens(e.answer_tokens, e),
                f"{e.seconds:.1f} s",
                e.error or ("the answer was truncated" if e.is_truncated else ""),
            )
            for number, e in enumerate(self.exchanges, 1)
        ]
        use = self.result.model_use if self.result is not None else None
        total = f"<p>{escape(model_line(use))}</p>" if use is not None else ""
        head = ("", "Purpose", "Model", "Tokens sent", "Tokens received", "Time", "Failure")
        classes = ("number", "word", "", "number", "number", "number")
        return f"<h2>Language model</h2>\n{total}\n{table(head, rows, classes=classes)}"

    def _environment(self) -> str:
        env = self.environment
        if env is None:
            return ""
        facts = [
            ("GPU", env.gpu or "none"),
            ("Architecture", env.capability),
            ("Driver", env.driver),
            ("torch", env.torch),
            ("triton", env.triton or "not installed"),
            ("Python", env.python),
        ]
        return f"<h2>Environment</h2>\n{table(('', ''), [fact for fact in facts if fact[1]], classes=('word', ''))}"


def stored_page(stored: StoredRun, kept_steps: frozenset[int] | None = None) -> Page:
    """The page of a stored run."""
    record = stored.record
    identity = (record.id, record.path, record.qualname, record.started)
    page = RunPage(*identity, stored.steps, record.environment, stored.result, stored.exchanges, kept_steps)
    return replace(page, resume_command=stored.resume_command).page()


def _name(step: Step) -> str:
    return f"{step.index}. {step.action.text}"


def _checks(step: Step, verdict: Verdict) -> str:
    rows = [(group.name, group.worst.value, group.counts, group.detail) for group in by_name(verdict.checks)]
    facts = [*verdict.notes, *(report_lines(step.report) if step.report is not None else [])]
    notes = "".join(f"<li>{escape(fact)}</li>" for fact in facts)
    body = (f"<ul>{notes}</ul>\n" if notes else "") + table(
        ("Check", "Outcome", "Cases", "Detail"), rows, classes=("word", "word", "word")
    )
    return folded(f"Step {step.index}: {verdict_line(verdict)}", body, is_open=not verdict.is_correct)


def _tokens(count: int, exchange: Exchange) -> str:
    return str(count) if exchange.counted else f"about {count}"
