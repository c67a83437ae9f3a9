"""The page of a training: data, results on held-out families, and curves; as HTML, Markdown and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mtmc_lsp.core.json_codec import to_json
from mtmc_lsp.policies.model_file import ModelHeader
from mtmc_lsp.report.line_chart import lines
from mtmc_lsp.report.page import Page, escape, figure, table
from mtmc_lsp.training.evaluation import RANKER, ROOFLINE, SECONDS, PartEvaluation
from mtmc_lsp.training.ranker import CHECKED_POSITION, RankerOptions, TrainedRanker

MARKS = (1, 2, 4, 8, 16, 24)
"""Numbers of candidates in the table."""
LIMITS = (
    "A replay can only try what was measured: a run that reaches a version which was not explored further ends there "
    "(`unexplored`). Final numbers need runs on a GPU."
)


@dataclass(frozen=True)
class TrainingReport:
    """Everything that a page shows."""

    trained: TrainedRanker
    options: RankerOptions
    parts: tuple[PartEvaluation, ...]

    def to_document(self) -> dict[str, Any]:
        """The report as JSON."""
        header: dict[str, Any] = to_json(self.trained.model.header)
        return {
            "header": header,
            "options": to_json(self.options),
            "training_seconds": self.trained.seconds,
            "curve": [list(point) for point in self.trained.curve],
            "seconds": list(SECONDS),
            "parts": to_json(self.parts),
        }


def markdown(report: TrainingReport) -> str:
    """The report as Markdown, without curves."""
    parts = [f"# {TITLE}\n", *(f"- {fact}" for fact in _facts(report)), ""]
    for part in report.parts:
        parts.append(f"## {_heading(part)}\n")
        for head, rows in (_metrics_table(part), _replay_table(part), _seconds_table(part)):
            if rows:
                parts += [_markdown_table(head, rows), ""]
        if comparison := _comparison(part):
            parts += [comparison, ""]
    return "\n".join([*parts, LIMITS, ""])


def page(report: TrainingReport) -> Page:
    """The report as a page with curves."""
    facts = "".join(f"<li>{escape(fact)}</li>" for fact in _facts(report))
    body = [f"<h1>{escape(TITLE)}</h1>", f"<ul>{facts}</ul>"]
    charts: dict[str, dict[str, Any]] = {}
    curve = report.trained.curve
    if len(curve) > 1:
        charts["training"] = lines(
            {
                "training families": [(count, value) for count, value, _ in curve],
                "validation families": [(count, value) for count, _, value in curve if value is not None],
            },
            "trees",
            f"NDCG at {CHECKED_POSITION}",
        )
        body.append(figure("training", "NDCG while trees are added"))
    for part in report.parts:
        body.append(f"<h2>{escape(_heading(part))}</h2>")
        if part.timed_programs:
            by_count = {name: list(enumerate(item.by_candidates)) for name, item in part.replays.items()}
            by_time = {name: list(zip(SECONDS, item.by_seconds, strict=True)) for name, item in part.replays.items()}
            title = "speedup over the user's code (geometric mean)"
            charts[f"{part.part.value}-candidates"] = lines(
                by_count, "candidates tried", title, reference=part.best_in_tree
            )
            charts[f"{part.part.value}-seconds"] = lines(
                by_time, "seconds of trials", title, reference=part.best_in_tree
            )
            body.append(
                figure(f"{part.part.value}-candidates", "By candidates; the dashed line is the best of the trees")
            )
            body.append(figure(f"{part.part.value}-seconds", "By seconds, as the trials took when they were measured"))
        body += [table(head, rows) for head, rows in (_metrics_table(part), _replay_table(part)) if rows]
        if comparison := _comparison(part):
            body.append(f"<p>{escape(comparison)}</p>")
    body.append(f'<p class="quiet">{escape(LIMITS)}</p>')
    return Page(TITLE, "\n".join(body), charts)


TITLE = "Training of the ranker"
Table = tuple[list[str], list[list[object]]]


def _facts(report: TrainingReport) -> list[str]:
    header: ModelHeader = report.trained.model.header
    counts = ", ".join(f"{number} {name}" for name, number in header.counts.items())
    facts = [
        f"Data: {counts}",
        f"GPU: {header.device or 'none, nothing was timed'}",
        f"Environment of the data: {header.environment or 'not recorded'}",
        f"Trees: {_tree_count(report)}, temperature {header.temperature:.3g}, trained in {report.trained.seconds:.0f} s",
        f"STOP must score higher than all actions by {header.stop_margin:g}",
        f"File: {len(report.trained.model.to_bytes()) / 1e3:.0f} kB",
        f"Command: {header.command or 'not recorded'}",
        f"Commit: {header.commit or 'not recorded'}",
    ]
    if report.options.without:
        facts.append(f"Ablation: without {', '.join(report.options.without)}")
    if not report.parts:
        facts.append("No family is held out in this data, so nothing is known about other programs")
    return facts


def _tree_count(report: TrainingReport) -> int:
    return report.trained.model.trees.count("\nTree=")


def _heading(part: PartEvaluation) -> str:
    families = "1 family" if part.families == 1 else f"{part.families} families"
    return f"{part.part.value.capitalize()} families: {part.programs} programs of {families}"


def _metrics_table(part: PartEvaluation) -> Table:
    head = ["order of choices", "states", "NDCG", "best first", "best in 3", "STOP right", "STOP when nothing gains"]
    rows: list[list[object]] = [
        [
            *(name, item.states, f"{item.ndcg:.3f}"),
            *map(_percent, (item.top_1, item.top_3, item.stop_precision, item.stop_recall)),
        ]
        for name, item in (("ranker", part.ranker), ("roofline", part.roofline))
        if item is not None
    ]
    return head, rows


def _replay_table(part: PartEvaluation) -> Table:
    head = ["candidates", *map(str, MARKS), "mean candidates", "ends"]
    rows: list[list[object]] = []
    if part.timed_programs:
        for name, item in part.replays.items():
            ends = ", ".join(f"{reason} {count}" for reason, count in item.ends.items())
            rows.append([name, *(f"{item.by_candidates[mark]:.3f}x" for mark in MARKS), f"{item.candidates:.1f}", ends])
    return head, rows


def _seconds_table(part: PartEvaluation) -> Table:
    rows: list[list[object]] = []
    if part.timed_programs:
        rows = [[name, *(f"{value:.3f}x" for value in item.by_seconds)] for name, item in part.replays.items()]
    return ["seconds", *map(str, SECONDS)], rows


def _comparison(part: PartEvaluation) -> str:
    """How many candidates the ranker needs for what the roofline planner reaches."""
    if not part.timed_programs:
        return ""
    goal = part.replays[ROOFLINE].speedup
    needed, usual = part.replays[RANKER].candidates_for(goal), part.replays[ROOFLINE].candidates_for(goal)
    best = f"The best of the trees is {part.best_in_tree:.3f}x on {part.timed_programs} timed programs."
    if needed is None:
        return f"{best} {RANKER} does not reach the {goal:.3f}x of {ROOFLINE} ({usual} candidates)."
    return f"{best} {RANKER} reaches the {goal:.3f}x of {ROOFLINE} after {needed} candidates, and {ROOFLINE} after {usual}."


def _percent(share: float | None) -> str:
    return f"{100 * share:.0f} %" if share is not None else ""


def _markdown_table(head: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    lines_ = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in lines_)
