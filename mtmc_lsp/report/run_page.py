"""A run as a page, used by ``mtmc report --html`` and the editor's panel."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass

from mtmc_lsp.core.chat import Exchange
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.results import Verdict, Work
from mtmc_lsp.core.run import RunResult, RunStatus, Step, StepStatus
from mtmc_lsp.core.workload import Environment
from mtmc_lsp.report.charts import Gain, Point, Traffic, roofline, traffic, waterfall
from mtmc_lsp.report.checks import by_name
from mtmc_lsp.report.page import Page, escape, figure, table
from mtmc_lsp.report.phrases import headline, model_line, report_lines, speedup_text, verdict_line
from mtmc_lsp.search.stored_run import StoredRun

GAINS, TRAFFIC, ROOFLINE = "gains", "traffic", "roofline"
"""Figure names."""
ESTIMATED = "Bytes and operations are estimates of the cost model"
STATUS_TEXT = {RunStatus.RUNNING: "not finished", RunStatus.NO_GAIN: "no gain"}
"""Text for statuses whose value is not readable."""


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
    """Indices of the steps that the user's file contains; ``None`` if unknown."""

    @property
    def accepted(self) -> list[Step]:
        """The accepted steps, in order."""
        return [step for step in self.steps if step.status is StepStatus.ACCEPTED]

    def page(self) -> Page:
        """Build the page."""
        sections, charts = [self._head()], {}
        for title, name, chart, caption in self._charts():
            sections.append(f"<h2>{escape(title)}</h2>")
            sections.append(figure(name, caption) if chart is not None else f"<p>{escape(caption)}</p>")
            if chart is not None:
                charts[name] = chart
        sections += [self._steps(), self._verification(), self._ledger(), self._environment()]
        return Page(f"{self.target}: run {self.run}", "\n".join(part for part in sections if part), charts)

    # Head ------------------------------------------------------------------------------------------------------------

    def _head(self) -> str:
        when = datetime.datetime.fromtimestamp(self.started, datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
        status = self.result.status if self.result is not None else RunStatus.RUNNING
        env = self.environment
        device = "" if env is None else (env.gpu or "CPU: verified, not timed")
        facts = [self.path, device, STATUS_TEXT.get(status, status.value), f"run {self.run}", when]
        summary = headline(self.result) if self.result is not None else "This run is not finished."
        assumed = self.result.workload.assumed if self.result is not None else ()
        return "\n".join(
            [
                f"<header><h1>{escape(self.target)}</h1>",
                f'<p class="quiet">{escape(" · ".join(fact for fact in facts if fact))}</p>',
                f'<p class="headline">{escape(summary)}</p>',
                *[f'<p class="quiet">{escape(note)}</p>' for note in assumed],
                "</header>",
            ]
        )

    # Charts ----------------------------------------------------------------------------------------------------------

    def _charts(self) -> list[tuple[str, str, dict[str, object] | None, str]]:
        """Title, name, specification and caption of each chart. Without a specification, the caption gives the reason."""
        charts: list[tuple[str, str, dict[str, object] | None, str]] = []
        gains, baseline = self._gains()
        if gains:
            caption = "Each bar shows the speedup before and after the step; lines are 95 % intervals."
            charts.append(("Speedup step by step", GAINS, waterfall(gains, baseline), caption))
        else:
            charts.append(self._untimed())
        points, device = self._points()
        if points and device is not None:
            if any(point.seconds is not None for point in points):
                caption = f"{ESTIMATED}; times were measured. A version on the line has reached its limit."
            else:
                caption = f"{ESTIMATED}; nothing was timed, so each version is shown at its upper bound."
            charts.append(("Roofline", ROOFLINE, roofline(points, device), caption))
        return charts

    def _untimed(self) -> tuple[str, str, dict[str, object] | None, str]:
        steps = self._traffic()
        title = "Memory traffic step by step, estimated"
        if steps:
            caption = f"{ESTIMATED}. Nothing was timed: times and speedups need a GPU."
            return title, TRAFFIC, traffic(steps), caption
        reason = "no step was accepted" if not self.accepted else "the cost model does not cover these kernels"
        return title, TRAFFIC, None, f"Nothing was timedand nothing can be estimated: {reason}."

    def _gains(self) -> tuple[list[Gain], str]:
        """Speedup after each timed step, over the best baseline of the last one."""
        timed = [(step, step.timing) for step in self.accepted if step.timing is not None]
        best = timed[-1][1].best if timed else ""
        gains: list[Gain] = []
        for step, timing in timed:
            ratio = timing.against(best)
            if ratio is not None:
                gains.append(Gain(_name(step), gains[-1].after.ratio if gains else 1.0, ratio))
        return gains, best

    def _traffic(self) -> list[Traffic]:
        before = self.result.work if self.result is not None else None
        steps = []
        for step in self.accepted:
            if step.work is not None and before is not None:
                steps.append(Traffic(_name(step), before.bytes, step.work.bytes))
            before = step.work
        return steps

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

    # Tables ----------------------------------------------------------------------------------------------------------

    def _steps(self) -> str:
        rows = [
            (s.index, s.action.text, self._status_text(s), _speed(s), s.action.rationale, s.reason) for s in self.steps
        ]
        head = ("", "Step", "Status", "Speedup", "Reason", "Result")
        classes = ("number", "name", "word", "word", "sentence", "sentence")
        body = table(head, rows, classes=classes) if rows else "<p>No step was tried.</p>"
        return f"<h2>Steps</h2>\n{body}"

    def _status_text(self, step: Step) -> str:
        if step.status is not StepStatus.ACCEPTED or self.kept_steps is None:
            return step.status.value
        return "kept" if step.index in self.kept_steps else "pending"

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
    return RunPage(*identity, stored.steps, record.environment, stored.result, stored.exchanges, kept_steps).page()


def _name(step: Step) -> str:
    return f"{step.index}. {step.action.text}"


def _speed(step: Step) -> str:
    if step.timing is None:
        return "not timed"
    cached = " (cached)" if step.timing.cached else ""
    return f"{speedup_text(step.timing)}{cached}"


def _checks(step: Step, verdict: Verdict) -> str:
    rows = [(group.name, group.worst.value, group.counts, group.detail) for group in by_name(verdict.checks)]
    facts = [*verdict.notes, *(report_lines(step.report) if step.report is not None else [])]
    notes = "".join(f"<li>{escape(fact)}</li>" for fact in facts)
    is_open = "" if verdict.is_correct else " open"
    return "\n".join(
        [
            f'<details{is_open} id="step-{step.index}"><summary>Step {step.index}: {escape(verdict_line(verdict))}</summary>',
            f"<ul>{notes}</ul>" if notes else "",
            table(("Check", "Outcome", "Cases", "Detail"), rows, classes=("word", "word", "word")),
            "</details>",
        ]
    )


def _tokens(count: int, exchange: Exchange) -> str:
    return str(count) if exchange.counted else f"about {count}"
