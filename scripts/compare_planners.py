"""Compare planners by complete runs on the same problems, at equal conditions: what each file gains, and how fast it gains.

Usage: python scripts/compare_planners.py SUITE... --out RUNS.jsonl [--lm FOLDER] [--seconds 540] [--budget 25] [--jobs N]
       python scripts/compare_planners.py --summary RUNS.jsonl [--report REPORT.md]

A SUITE is a folder of problems as for `mtmc bench`, or `public:reporting`, a half of a suite of this repository. The runs of one
problem follow each other on one GPU, and the order of the planners rotates from problem to problem. All visible GPUs are used.
Start it again to continue. The report counts only problems that all planners ended; REPORT.json and REPORT.html (with curves,
needs the extra `report`) are beside it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mtmc_lsp.app.bench.comparison.running import ENTRANTS, USUAL, Comparison, Contest, mixed, read_runs
from mtmc_lsp.app.bench.comparison.summary import SECONDS, ComparisonSummary, Group, Mean, summarise_comparison
from mtmc_lsp.app.bench.jobs import LocalJobs
from mtmc_lsp.app.bench.opening import named_suite, suite_problems, suite_python, with_files
from mtmc_lsp.app.bench.runner import Plan, describe_environment, visible_devices
from mtmc_lsp.app.bench.suite import Shard, choose
from mtmc_lsp.commands.options import read_project_settings
from mtmc_lsp.core.errors import EnvironmentNotAble, MtmcError
from mtmc_lsp.core.json_codec import to_json
from mtmc_lsp.process.fork_server import ForkServer, likely_variables
from mtmc_lsp.process.priority import usable_cores
from mtmc_lsp.report.line_chart import lines
from mtmc_lsp.report.page import Page, escape, figure, render, table

MARKS = (1, 2, 3, 4, 8)
"""Numbers of candidates in the table."""
TITLE = "Planners in complete runs"
LIMIT = 20.0
"""Seconds beyond the budget after which a run is ended, if no time limit is named."""
CORES_PER_JOB = 4
Table = tuple[str, list[str], list[list[object]]]


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", metavar="SUITE")
    parser.add_argument("--out", type=Path, help="the file of runs; what is in it is not run again")
    parser.add_argument("--summary", type=Path, metavar="RUNS", help="only summarise this file")
    parser.add_argument("--report", type=Path, help="the .md file of the report; RUNS.md by default")
    parser.add_argument("--planners", default="", help=f"names from {', '.join(ENTRANTS)}, separated by commas")
    parser.add_argument(
        "--lm", default="", metavar="FOLDER", help="the policy of lm planners; without it they are left out"
    )
    parser.add_argument("--policy-file", default="", help="the ranker; the model of this version by default")
    parser.add_argument("--budget", type=float, default=25.0, help="seconds after which a run starts no new step")
    parser.add_argument("--time-limit", type=float, default=0.0, help="most seconds of a run; 20 more than the budget")
    parser.add_argument("--seconds", type=float, default=540.0, help="no run starts that could end later")
    parser.add_argument(
        "--jobs", type=int, default=0, help="problems at a time; by default one for each GPU, or for 4 cores"
    )
    parser.add_argument("--limit", type=int, help="at most so many problems of each suite, from all levels")
    parser.add_argument("--filter", default="", help="only problems named so")
    parser.add_argument("--python", default="", help="the interpreter of the problems")
    options = parser.parse_args()
    names = [name.strip() for name in options.planners.split(",") if name.strip()]
    if unknown := [name for name in names if name not in ENTRANTS]:
        parser.error(f"there is no planner {unknown[0]}; choose from {', '.join(ENTRANTS)}")
    if lacking := [name for name in names if ENTRANTS[name].needs_policy and not options.lm and not options.summary]:
        parser.error(f"{lacking[0]} needs --lm")
    if not names and not options.summary:
        names = [name for name in USUAL if options.lm or not ENTRANTS[name].needs_policy]
    if options.summary is None and (options.out is None or not options.suites):
        parser.error("name suites and --out, or --summary")
    try:
        if options.summary is None:
            solve(options, names)
        runs = options.summary or options.out
        records = read_runs(runs)
        present = [name for name in ENTRANTS if any(record["entrant"] == name for record in records)]
        if not present:
            print(f"{runs}: no run ended", file=sys.stderr)
            return 1
        write(summarise_comparison(records, names or present), options.report or runs.with_suffix(".md"))
    except MtmcError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


# Running ----------------------------------------------------------------------------------------------------------


def solve(options: argparse.Namespace, names: Sequence[str]) -> None:
    """Run what the file of runs does not have, and print a line for each problem."""
    options.out.parent.mkdir(parents=True, exist_ok=True)
    contests = mixed([contest for suite in options.suites for contest in contests_of(suite, options, names)])
    devices = visible_devices()
    jobs = options.jobs or len(devices) or max(1, len(usable_cores()) // CORES_PER_JOB)
    python = next(iter(contests[0].plans.values())).python
    with (
        ForkServer(python, likely_variables(), preload=True) as fork_server,
        LocalJobs(jobs, devices, fork_server) as local,
    ):
        comparison = Comparison(options.out, local, options.seconds)
        print(
            f"{len(contests)} problems, {len(names)} planners, {jobs} at a time on {len(devices)} GPUs", file=sys.stderr
        )
        if devices:
            comparison.warm_up(contests[0])
        for contest, records in comparison.run(contests):
            if records:
                told = ", ".join(f"{record['entrant']} {record['status']}" for record in records)
                print(f"{contest.problem.name}: {told}", file=sys.stderr, flush=True)


def contests_of(suite: str, options: argparse.Namespace, names: Sequence[str]) -> list[Contest]:
    """The problems of a suite, each with the settings of all planners."""
    name, _, half = suite.partition(":") if not Path(suite).exists() else (suite, "", "")
    place = Path(name).absolute() if Path(name).exists() else named_suite(name)
    problems = choose(suite_problems(place, half, options.out), options.filter, options.limit, Shard())
    if not problems:
        return []
    base = read_project_settings(place, None, options.budget)
    python = suite_python(place, problems[0], base, options.python)
    environment = describe_environment(python)
    plans: dict[str, Plan] = {}
    for entrant in [ENTRANTS[each] for each in names]:
        policy = options.lm if entrant.needs_policy else options.policy_file if entrant.planner == "ranker" else ""
        changes: dict[str, object] = {
            "planner": entrant.planner,
            "search": entrant.search,
            "policy_file": policy or None,
        }
        settings = read_project_settings(place, None, options.budget, **changes)
        settings = settings if policy else replace(settings, policy_file="")
        plans[entrant.name] = Plan(settings, python, options.time_limit or options.budget + LIMIT, environment)
    present = with_files(problems, place, python)
    return [Contest(problem, problem.level or place.name, plans) for problem in present]


# The report -------------------------------------------------------------------------------------------------------


def write(summary: ComparisonSummary, report: Path) -> None:
    """Write the report as Markdown, JSON and, if that is possible, a page with curves; print the Markdown."""
    text = markdown(summary)
    report.write_text(text, encoding="utf-8")
    document: dict[str, Any] = to_json(summary)
    report.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    try:
        report.with_suffix(".html").write_text(render(page(summary)), encoding="utf-8")
    except EnvironmentNotAble as error:
        print(f"no page with curves is written: {error.message}. {error.remedy}", file=sys.stderr)
    print(text)


def markdown(summary: ComparisonSummary) -> str:
    """The report without curves."""
    texts = [f"# {TITLE}\n", *(f"- {fact}" for fact in facts(summary)), ""]
    for group in summary.groups:
        texts.append(f"## {heading(group)}\n")
        for title, head, rows in tables(group):
            whole: list[Sequence[object]] = [head, ["---"] * len(head), *rows]
            body = "\n".join(f"| {' | '.join(str(cell) for cell in row)} |" for row in whole)
            texts += [f"{title}:\n", body, ""]
    return "\n".join(texts)


def page(summary: ComparisonSummary) -> Page:
    """The report with curves."""
    items = "".join(f"<li>{escape(fact)}</li>" for fact in facts(summary))
    body = [f"<h1>{escape(TITLE)}</h1>", f"<ul>{items}</ul>"]
    charts: dict[str, dict[str, Any]] = {}
    for number, group in enumerate(summary.groups):
        body.append(f"<h2>{escape(heading(group))}</h2>")
        curves = {
            "candidates": {name: list(enumerate(item.by_candidates)) for name, item in group.standings.items()},
            "seconds": {
                name: list(zip(SECONDS, item.by_seconds, strict=False)) for name, item in group.standings.items()
            },
        }
        for axis, drawn in curves.items():
            known: Mapping[str, Any] = {name: points for name, points in drawn.items() if len(points) > 1}
            if known:
                key = f"group{number}-{axis}"
                charts[key] = lines(known, axis, "best verified speedup over eager (geometric mean)")
                body.append(figure(key, f"By {axis}"))
        body += [f"<p>{escape(title)}</p>{table(head, rows)}" for title, head, rows in tables(group)]
    return Page(TITLE, "\n".join(body), charts)


def facts(summary: ComparisonSummary) -> list[str]:
    """Where and with what the runs were made, and what does not count."""
    left_out = [f"Not counted: {count} problems ({reason})" for reason, count in summary.left_out.items()]
    return [*summary.environments, *summary.builds, "Intervals: 95 %, by a bootstrap over problems", *left_out]


def heading(group: Group) -> str:
    """``level1: 20 problems``."""
    return f"{group.name or 'All'}: {group.problems} problems that all planners ended"


def tables(group: Group) -> list[Table]:
    """Titles, heads and rows; only the counts if nothing was timed."""
    standings = group.standings
    reached: list[list[object]] = [
        [
            name,
            _mean(item.over_eager),
            f"{_mean(item.over_best)} of {item.over_best_count}" if item.over_best else "",
            _mean(item.relative, unit=""),
            item.faster,
            f"{item.candidates:.1f}",
            f"{item.seconds:.1f} s",
        ]
        for name, item in standings.items()
    ]
    columns = ["over eager", "over the best baseline", f"of {next(iter(standings))}", "faster", "candidates", "run"]
    found: list[Table] = [("What the files gain", ["", *columns], reached)]
    if any(item.by_candidates for item in standings.values()):
        counted: list[list[object]] = [
            [name, *(f"{item.by_candidates[min(mark, len(item.by_candidates) - 1)]:.3f}x" for mark in MARKS)]
            for name, item in standings.items()
            if item.by_candidates
        ]
        timed: list[list[object]] = [
            [name, *(f"{value:.3f}x" for value in item.by_seconds)] for name, item in standings.items()
        ]
        found.append(("Best verified speedup by candidates", ["", *map(str, MARKS)], counted))
        found.append(("Best verified speedup by seconds", ["", *(f"{number} s" for number in SECONDS)], timed))
    return found


def _mean(value: Mean | None, unit: str = "x") -> str:
    return f"{value.value:.3f}{unit} ({value.low:.3f} to {value.high:.3f})" if value is not None else ""


if __name__ == "__main__":
    sys.exit(main())
