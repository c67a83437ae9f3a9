"""``mtmc bench DIR``: optimize every problem of a suite, and summarise the results."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from mtmc_lsp.commands.options import (
    Arch,
    AsJson,
    MaxAutotune,
    PolicyFile,
    Python,
    Search,
    check_choice,
    read_project_settings,
)
from mtmc_lsp.core.errors import RequestError
from mtmc_lsp.core.settings import SEARCHES, override_settings

if TYPE_CHECKING:
    from mtmc_lsp.app.bench.runner import Plan
    from mtmc_lsp.app.bench.suite import Problem
    from mtmc_lsp.core.settings import Settings

SUITE_G, SUITE_T = "tritonbench-g", "tritonbench-t"
DEFAULT_OUT = Path("results.jsonl")
SECONDS = 600.0
"""The default time limit of one problem."""
LOCAL_PLANNERS = ("roofline", "ranker", "lm")
"""Planners that ask no language model: nobody can agree to one in a bench."""
MAX_JOBS = 4
CORES_PER_JOB = 4


def bench(
    folder: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Argument(metavar="DIR", help="A folder of problems: files with `Model` and `get_inputs`."),
    ] = None,
    suite: Annotated[
        str,
        typer.Option(
            "--suite",
            metavar="NAME",
            help="A suite of this tool's repository: public, everyday; or tritonbench-g, tritonbench-t with DIR.",
        ),
    ] = "",
    half: Annotated[str, typer.Option("--half", help="Of a suite of installed packages: looking or reporting.")] = "",
    out: Annotated[
        Path, typer.Option("--out", help="The file of results; what is in it is not run again.")
    ] = DEFAULT_OUT,
    summary: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--summary", metavar="RESULTS", help="Only summarise this file."),
    ] = None,
    pattern: Annotated[str, typer.Option("--filter", help="Only problems named so: level2/*, or a part.")] = "",
    limit: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--limit", min=1, help="At most so many problems, from all levels."),
    ] = None,
    shard: Annotated[str, typer.Option("--shard", metavar="I/N", help="Only the i-th of n parts.")] = "1/1",
    jobs: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--jobs", min=1, help="Problems at a time; timing is one at a time on each GPU."),
    ] = None,
    seconds: Annotated[float, typer.Option("--time-limit", min=1, help="Most seconds of one problem.")] = SECONDS,
    budget: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option("--budget", help="Seconds after which a problem starts no new step."),
    ] = None,
    without: Annotated[
        str,
        typer.Option(
            "--without", metavar="NAMES", help="Actions and rewrite rules that are not proposed: autotune,library."
        ),
    ] = "",
    search: Search = None,
    planner: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Who chooses the next step: roofline (the default), ranker or lm."),
    ] = None,
    policy_file: PolicyFile = None,
    arch: Arch = None,
    max_autotune: MaxAutotune = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Run again what is in the file already.")] = False,
    mixed: Annotated[
        bool, typer.Option("--mixed", help="With --summary: accept results of several versions of this tool.")
    ] = False,
    python: Python = "",
    as_json: AsJson = False,
) -> int:
    """Optimise every problem of a folder; each result is a line of a file, and a run that was ended goes on."""
    from mtmc_lsp.app.bench.manifest import HALVES
    from mtmc_lsp.app.bench.opening import suite_problems, with_files
    from mtmc_lsp.app.bench.runner import read_results
    from mtmc_lsp.app.bench.suite import choose, parse_shard
    from mtmc_lsp.app.bench.summary import check_one_build, summarise
    from mtmc_lsp.report.bench_tables import show_summary
    from mtmc_lsp.report.console import console
    from mtmc_lsp.report.documents import document

    check_choice("search", search or SEARCHES[0], SEARCHES)
    if summary is not None and not summary.is_file():
        raise RequestError(f"there is no file {summary}", remedy="Name a file that `mtmc bench --out` wrote.")
    if suite == SUITE_G and folder is not None:
        from mtmc_lsp.commands.kernels.bench import bench_kernels

        settings = read_project_settings(folder.absolute(), arch, budget)
        return bench_kernels(
            folder.absolute(),
            out,
            settings,
            python=python,
            pattern=pattern,
            limit=limit,
            shard=shard,
            jobs=jobs or 1,
            seconds=min(seconds, budget or seconds),
            fresh=fresh,
            as_json=as_json,
        )
    folder = _torch_suite(folder, out, python) if suite == SUITE_T else _suite_folder(folder, suite)
    if folder is None and summary is None:
        raise RequestError("no folder of problems is named", remedy="Write mtmc bench DIR.")
    if half:
        check_choice("half", half, HALVES)
    problems = suite_problems(folder, half, out) if folder is not None else []
    problems = choose(problems, pattern, limit, parse_shard(shard))
    if folder is not None and not problems:
        raise RequestError("no problem is left", remedy="Change --filter or --shard.")
    if summary is None:
        assert folder is not None
        check_choice("planner", planner or LOCAL_PLANNERS[0], LOCAL_PLANNERS)
        settings = read_project_settings(
            folder.absolute(),
            arch,
            budget,
            max_autotune=max_autotune,
            planner=planner,
            search=search,
            policy_file=policy_file,
        )
        if without:
            settings = override_settings(settings, exclude_actions=tuple(name.strip() for name in without.split(",")))
        plan = _plan(folder, problems[0], settings, seconds, python)
        _solve(with_files(problems, folder, plan.python), out, plan, jobs, fresh)
    requested = [(problem.name, problem.level) for problem in problems]
    names = {name for name, _ in requested}
    results = summary or out
    records = [record for record in read_results(results) if not requested or record["problem"] in names]
    if not mixed:
        check_one_build(records, str(results))
    result_summary = summarise(records, requested)
    if as_json:
        print(document(summary=result_summary, results=str(results)))
    else:
        show_summary(console(), result_summary)
    return 0 if result_summary.scores[0].correct else 1


def _torch_suite(path: Path | None, out: Path, python: str) -> Path:
    """The functions of TritonBench-T with their workloads, in a folder beside the results.

    Raises:
        RequestError: no copy of the suite is named.
    """
    from mtmc_lsp.app.bench.tritonbench_torch import write_problems
    from mtmc_lsp.app.interpreter import checked_python

    if path is None:
        raise RequestError(f"--suite {SUITE_T} needs a folder", remedy="Write mtmc bench --suite tritonbench-t DIR.")
    folder = out.with_suffix(".problems")
    written, left_out = write_problems(path.absolute(), folder, checked_python(python or sys.executable))
    for name, reason in left_out.items():
        print(f"{name} is left out: {reason}", file=sys.stderr)
    print(f"{len(written)} functions have a workload from their test, {len(left_out)} have none", file=sys.stderr)
    return folder


def _suite_folder(folder: Path | None, suite: str) -> Path | None:
    """The folder of problems that the command line names, if it names one."""
    from mtmc_lsp.app.bench.opening import named_suite

    if not suite:
        return folder
    if folder is not None:
        raise RequestError("both a folder and --suite are named", remedy="Name one of them.")
    return named_suite(suite)


def _plan(folder: Path, problem: Problem, settings: Settings, seconds: float, python: str) -> Plan:
    """How problems are solved: by the interpreter of the suite's project, unless the command line names one."""
    from mtmc_lsp.app.bench.opening import suite_python
    from mtmc_lsp.app.bench.runner import Plan, describe_environment

    interpreter = suite_python(folder, problem, settings, python)
    return Plan(settings, interpreter, seconds, describe_environment(interpreter))


def _solve(problems: Sequence[Problem], out: Path, plan: Plan, jobs: int | None, fresh: bool) -> None:
    """Solve the problems without a result in ``out``, and print one line for each."""
    from mtmc_lsp.app.bench.runner import Bench, visible_devices
    from mtmc_lsp.app.bench.summary import why_nothing
    from mtmc_lsp.process.fork_server import ForkServer, likely_variables
    from mtmc_lsp.process.priority import usable_cores

    devices = visible_devices()
    jobs = jobs or min(MAX_JOBS, max(1, len(usable_cores()) // CORES_PER_JOB)) * max(1, len(devices))
    reused = 0
    with ForkServer(plan.python, likely_variables(), preload=True) as fork_server:
        bench = Bench(plan, out, jobs=jobs, devices=devices, fork_server=fork_server)
        for number, (problem, record, is_reused) in enumerate(bench.run(problems, fresh=fresh), 1):
            reused += is_reused
            if is_reused:
                continue
            reason = why_nothing(record).splitlines()[:1]
            outcome = f"{record['status']}{': ' + reason[0] if reason else ''}"
            seconds = f"{record['wall_seconds']:.1f} s"
            print(f"[{number}/{len(problems)}] {problem.name}  {seconds}  {outcome}", file=sys.stderr)
    if reused:
        print(f"{reused} of {len(problems)} results are from before ({out}); --fresh makes them again", file=sys.stderr)
