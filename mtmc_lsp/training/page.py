"""The page of a training: data, results on held-out families, and curves; as HTML, Markdown and JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mtmc_lsp.core.json_codec import to_json
from mtmc_lsp.policies.model_file import ModelHeader
from mtmc_lsp.report.line_chart import lines
from mtmc_lsp.report.page import Page, escape, figure, table
from mtmc_lsp.training.evaluation import PartEvaluation
from mtmc_lsp.training.ranker import CHECKED_POSITION, RankerOptions, TrainedRanker
from mtmc_lsp.training.replay_page import LIMITS, Table, markdown_table, replay_curves, replay_tables
from mtmc_lsp.training.replays import RANKER, ROOFLINE, SECONDS


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
        head, rows = _metrics_table(part)
        parts += [markdown_table(head, rows), ""] * bool(rows)
        for title, head, rows in replay_tables(part.timed):
            parts += [f"{title}:\n", markdown_table(head, rows), ""]
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
        if part.timed.programs:
            figures, drawn = replay_curves(part.part.value, part.timed)
            body += figures
            charts |= drawn
        head, rows = _metrics_table(part)
        body += [table(head, rows)] * bool(rows)
        body += [f"<p>{escape(title)}</p>{table(head, rows)}" for title, head, rows in replay_tables(part.timed)]
        if comparison := _comparison(part):
            body.append(f"<p>{escape(comparison)}</p>")
    body.append(f'<p class="quiet">{escape(LIMITS)}</p>')
    return Page(TITLE, "\n".join(body), charts)


TITLE = "Training of the ranker"


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


def _comparison(part: PartEvaluation) -> str:
    """How many candidates the ranker needs for what the roofline planner reaches."""
    if not part.timed.programs:
        return ""
    replays = part.timed.replays
    goal = replays[ROOFLINE].speedup
    needed, usual = replays[RANKER].candidates_for(goal), replays[ROOFLINE].candidates_for(goal)
    best = f"The best of the trees is {part.timed.best_in_tree:.3f}x on {part.timed.programs} timed programs."
    if needed is None:
        return f"{best} {RANKER} does not reach the {goal:.3f}x of {ROOFLINE} ({usual} candidates)."
    return f"{best} {RANKER} reaches the {goal:.3f}x of {ROOFLINE} after {needed} candidates, and {ROOFLINE} after {usual}."


def _percent(share: float | None) -> str:
    return f"{100 * share:.0f} %" if share is not None else ""
