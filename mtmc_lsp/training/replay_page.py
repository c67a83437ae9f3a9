"""The replays of several planners as tables and curves; as HTML, Markdown and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mtmc_lsp.core.json_codec import to_json
from mtmc_lsp.report.line_chart import lines
from mtmc_lsp.report.page import Page, escape, figure, table
from mtmc_lsp.training.replays import ROOFLINE, SECONDS, ReplayedPrograms

MARKS = (1, 2, 4, 8, 16, 24)
"""Numbers of candidates in the table."""
LIMITS = (
    "A replay can only try what was measured: a run that reaches a version which was not explored further ends there "
    "(`unexplored`). Final numbers need runs on a GPU."
)
TITLE = "Planners and searches on measured trees"
Table = tuple[list[str], list[list[object]]]


@dataclass(frozen=True)
class ReplayReport:
    """Everything that a page of replays shows."""

    part: str
    """``validation`` or ``test``."""
    replayed: ReplayedPrograms
    facts: tuple[str, ...]
    """Data, policies, command and commit."""

    def to_document(self) -> dict[str, Any]:
        """The report as JSON."""
        replayed: dict[str, Any] = to_json(self.replayed)
        return {"part": self.part, "seconds": list(SECONDS), "facts": list(self.facts), **replayed}


def replay_markdown(report: ReplayReport) -> str:
    """The report as Markdown, without curves."""
    texts = [f"# {TITLE}\n", *(f"- {fact}" for fact in report.facts), "", f"## {_heading(report)}\n"]
    for title, head, rows in replay_tables(report.replayed):
        texts += [f"{title}:\n", markdown_table(head, rows), ""]
    return "\n".join([*texts, LIMITS, ""])


def replay_page(report: ReplayReport) -> Page:
    """The report as a page with curves."""
    facts = "".join(f"<li>{escape(fact)}</li>" for fact in report.facts)
    body, charts = replay_curves(report.part, report.replayed)
    tables = [f"<p>{escape(title)}</p>{table(head, rows)}" for title, head, rows in replay_tables(report.replayed)]
    head = [f"<h1>{escape(TITLE)}</h1>", f"<ul>{facts}</ul>", f"<h2>{escape(_heading(report))}</h2>"]
    return Page(TITLE, "\n".join([*head, *body, *tables, f'<p class="quiet">{escape(LIMITS)}</p>']), charts)


def replay_curves(name: str, replayed: ReplayedPrograms) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """Figures and charts of the speedups against candidates and against seconds.

    Args:
        name: begins the names of the figures.
    """
    title = "speedup over the user's code (geometric mean)"
    best = replayed.best_in_tree
    counted = {key: list(enumerate(item.by_candidates)) for key, item in replayed.replays.items()}
    timed = {key: list(zip(SECONDS, item.by_all_seconds, strict=True)) for key, item in replayed.replays.items()}
    charts = {
        f"{name}-candidates": lines(counted, "candidates tried", title, reference=best),
        f"{name}-seconds": lines(timed, "seconds of trials and choices", title, reference=best),
    }
    captions = ("By candidates; the dashed line is the best of the trees", "By seconds, as trials and choices took")
    return [figure(key, caption) for key, caption in zip(charts, captions, strict=True)], charts


def replay_tables(replayed: ReplayedPrograms) -> list[tuple[str, list[str], list[list[object]]]]:
    """Titles, heads and rows; none without programs."""
    if not replayed.programs:
        return []
    goal = replayed.replays[ROOFLINE].speedup
    head = ["", *map(str, MARKS), f"reaches {goal:.3f}x after", f"of {ROOFLINE}", "mean candidates", "ends"]
    counted: list[list[object]] = []
    for name, item in replayed.replays.items():
        ends = ", ".join(f"{reason} {count}" for reason, count in item.ends.items())
        low, high = item.relative_range
        relative = f"{item.relative:.3f} ({low:.3f} to {high:.3f})"
        reached = item.candidates_for(goal)
        speedups = [f"{item.by_candidates[mark]:.3f}x" for mark in MARKS]
        counted.append(
            [name, *speedups, reached if reached is not None else "never", relative, f"{item.candidates:.1f}", ends]
        )
    times: list[list[object]] = [
        [name, *(f"{value:.3f}x" for value in item.by_seconds), f"{1e3 * item.decision_seconds:.1f} ms"]
        for name, item in replayed.replays.items()
    ]
    all_times: list[list[object]] = [
        [name, *(f"{value:.3f}x" for value in item.by_all_seconds)] for name, item in replayed.replays.items()
    ]
    seconds = [f"{number} s" for number in SECONDS]
    return [
        ("Speedup by candidates", head, counted),
        ("Speedup by seconds of trials", ["", *seconds, "choices before a candidate"], times),
        ("Speedup by seconds of trials and choices", ["", *seconds], all_times),
    ]


def markdown_table(head: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """A table as Markdown."""
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in [head, ["---"] * len(head), *rows])


def _heading(report: ReplayReport) -> str:
    replayed = report.replayed
    families = "1 family" if replayed.families == 1 else f"{replayed.families} families"
    best = f"the best of their trees is {replayed.best_in_tree:.3f}x"
    return f"{report.part.capitalize()} families: {replayed.programs} programs of {families}; {best}"
