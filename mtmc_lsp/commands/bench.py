"""``mtmc bench DIR``: optimize every problem of a suite, and summarise the results."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from mtmc_lsp.commands.options import (
    Arch,
    AsJson,
    Cluster,
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
LOCAL_PLANNERS = ("roofline", "ranker", "lm", "random")
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
    verified: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--verified",
            metavar="FOLDER",
            help="A copy of KernelBench-Verified: its problems, and its evaluation of the results.",
        ),
    ] = None,
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
    total: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            "--seconds", min=1, help="With tritonbench-g: ends after so many seconds; the next run does what is left."
        ),
    ] = None,
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
        typer.Option(help="Chooses the next step: roofline (the default), ranker, lm or random."),
    ] = None,
    policy_file: PolicyFile = None,
    arch: Arch = None,
    max_autotune: MaxAutotune = None,
    cluster: Cluster = "",
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
    from mtmc_lsp.report.console import console, show
    from mtmc_lsp.report.documents import document

    check_choice("search", search or SEARCHES[0], SEARCHES)
    if summary is not None and not summary.is_file():
        raise RequestError(f"there is no file {summary}", remedy="Name a file that `mtmc bench --out` wrote.")
    if suite == SUITE_G and folder is not None:
        from mtmc_lsp.commands.kernels.bench import bench_kernels

        return bench_kernels(
            folder.absolute(),
            out,
            _without(read_project_settings(folder.absolute(), arch, budget), without),
            python=python,
            pattern=pattern,
            limit=limit,
            shard=shard,
            jobs=jobs or 1,
            seconds=min(seconds, budget or seconds),
            total=total,
            fresh=fresh,
            as_json=as_json,
        )
    if total is not None:
        raise RequestError(
            f"--seconds limits --suite {SUITE_G} alone",
            remedy="Limit each problem by --time-limit, and their number by --limit.",
        )
    checkout, tests_pass = None, True
    if verified is not None and summary is None:
        folder = _verified_suite(verified, folder, suite, out)
    else:
        checkout = folder if suite == SUITE_T else None
        folder = _torch_suite(folder, out, python) if suite == SUITE_T else _suite_folder(folder, suite)
    if folder is None and summary is None:
        raise RequestError("no folder of problems is named", remedy="Write mtmc bench DIR.")
    if half:
        check_choice("half", half, HALVES)
    problems = suite_problems(folder, half, out) if folder is not None else []
    problems = choose(problems, pattern, limit, parse_shard(shard))
    if folder is not None and not problems:
        raise RequestError("no problem is left", remedy="Change --filter or --shard.")
    if cluster and jobs is not None:
        raise RequestError("a worker of a cluster runs one problem at a time", remedy="Leave out --jobs.")
    results = {"": summary or out}
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
        settings = _without(settings, without)
        plan = _plan(folder, problems[0], settings, seconds, python)
        present = with_files(problems, folder, plan.python)
        if cluster:
            results = _solve_on_cluster(present, out, plan, cluster, fresh)
        else:
            _solve(present, out, plan, jobs, fresh)
        if checkout is not None and not cluster:
            from mtmc_lsp.commands.kernels.bench import run_tests

            tests_pass = run_tests(checkout.absolute(), present, out, plan.python)
        if verified is not None:
            return _evaluate(verified, present, results, out, plan.python, as_json=as_json)
    requested = [(problem.name, problem.level) for problem in problems]
    names = {name for name, _ in requested}
    summaries = {}
    for kind, path in results.items():
        records = [record for record in read_results(path) if not requested or record["problem"] in names]
        if not mixed:
            check_one_build(records, str(path))
        summaries[kind] = summarise(records, requested)
    if as_json and len(results) > 1:
        kinds = [{"gpu": kind, "summary": summaries[kind], "results": str(path)} for kind, path in results.items()]
        print(document(kinds=kinds))
    for kind, path in results.items():
        if not as_json:
            if len(results) > 1:
                show(console(), f"{kind} ({path})")
            show_summary(console(), summaries[kind])
        elif len(results) == 1:
            print(document(summary=summaries[kind], results=str(path)))
    return 0 if tests_pass and all(item.scores[0].correct for item in summaries.values()) else 1


def _without(settings: Settings, names: str) -> Settings:
    """The settings with further actions that are not proposed."""
    if not names:
        return settings
    return override_settings(settings, exclude_actions=tuple(name.strip() for name in names.split(",")))


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


def _verified_suite(checkout: Path, folder: Path | None, suite: str, out: Path) -> Path:
    """The problems of a copy of KernelBench-Verified, in a folder beside the results.

    Raises:
        RequestError: it is no copy, or other problems are named too.
        EnvironmentNotAble: there is no GPU.
    """
    from mtmc_lsp.app.bench.verified import check_copy, check_gpu, write_problems
    from mtmc_lsp.app.interpreter import query_gpus

    if folder is not None or suite:
        raise RequestError(
            "--verified has its problems already", remedy="Leave out DIR and --suite; choose problems with --filter."
        )
    check_copy(checkout)
    check_gpu(", ".join(query_gpus("name")))
    return write_problems(checkout, out.with_suffix(".problems"))


def _evaluate(
    checkout: Path, problems: Sequence[Problem], results: Mapping[str, Path], out: Path, python: str, *, as_json: bool
) -> int:
    """Run KernelBench-Verified's evaluator on the delivered files, and show its scores."""
    from dataclasses import asdict

    from mtmc_lsp.app.bench.verified import evaluate, scores
    from mtmc_lsp.report.bench_tables import show_verified
    from mtmc_lsp.report.console import console
    from mtmc_lsp.report.documents import document

    if len(results) > 1:
        raise RequestError("--verified needs GPUs of one kind", remedy="Name a cluster with one kind of GPU.")
    rows, file = [], out.with_suffix(".verified.jsonl")
    for number, row in enumerate(evaluate(checkout, problems, out, file, python), 1):
        rows.append(row)
        outcome = "as it was"
        if row["delivered"]:
            outcomes = {True: "correct", False: f"not correct: {row['why']}", None: f"not judged: {row['why']}"}
            outcome = outcomes[row["correct"]]
        print(f"[{number}/{len(problems)}] {row['problem']}  {outcome}", file=sys.stderr)
    table = scores(rows)
    if as_json:
        print(document(scores=[asdict(score) for score in table], results=str(out), evaluations=str(file)))
    else:
        show_verified(console(), table)
    return 0 if table[0].correct == table[0].delivered else 1


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
    """Solve the problems without a result in ``out`` on this machine, and print one line for each."""
    from mtmc_lsp.app.bench.jobs import LocalJobs
    from mtmc_lsp.app.bench.runner import Bench, visible_devices
    from mtmc_lsp.app.calibrate import calibrate_first
    from mtmc_lsp.process.fork_server import ForkServer, likely_variables
    from mtmc_lsp.process.priority import usable_cores

    devices = visible_devices()
    jobs = jobs or min(MAX_JOBS, max(1, len(usable_cores()) // CORES_PER_JOB)) * max(1, len(devices))
    with (
        ForkServer(plan.python, likely_variables(), preload=True) as fork_server,
        LocalJobs(jobs, devices, fork_server) as local,
    ):
        for gpu in calibrate_first(plan.python, devices, fork_server):
            print(f"measured the rates of {gpu} for all plans", file=sys.stderr)
        _show_results({"": Bench(plan, out, local).run(problems, fresh=fresh)}, {"": out}, len(problems))


def _solve_on_cluster(problems: Sequence[Problem], out: Path, plan: Plan, cluster: str, fresh: bool) -> dict[str, Path]:
    """Solve the problems on a cluster: on each kind of GPU that it has, with a file of results for each kind.

    Returns:
        The files by the kind of GPU; ``out`` alone if there is one kind.
    """
    from mtmc_lsp.app.bench.runner import Bench
    from mtmc_lsp.cluster.opening import open_cluster
    from mtmc_lsp.cluster.results import cluster_plan, file_of_kind

    with open_cluster(cluster, problems, plan.settings, plan.python) as session:
        kinds = list(session.kinds)
        files = {kind: file_of_kind(out, kind) if len(kinds) > 1 else out for kind in kinds}
        runs = {
            kind: Bench(cluster_plan(plan, session.software, kind), path, session.jobs(kind)).run(problems, fresh=fresh)
            for kind, path in files.items()
        }
        _show_results(runs, files, len(problems) * len(kinds))
    return files


def _show_results(
    runs: Mapping[str, Iterator[tuple[Problem, dict[str, Any], bool]]], files: Mapping[str, Path], count: int
) -> None:
    """Print one line for each result as it comes.

    Args:
        runs: results by the kind of GPU.
        count: of all results.
    """
    from mtmc_lsp.app.bench.summary import why_nothing
    from mtmc_lsp.cluster.opening import merge

    reused: Counter[str] = Counter()
    for number, (kind, (problem, record, is_reused)) in enumerate(merge(runs), 1):
        reused[kind] += is_reused
        if is_reused:
            continue
        reason = why_nothing(record).splitlines()[:1]
        outcome = f"{record['status']}{': ' + reason[0] if reason else ''}"
        name = f"{problem.name} ({kind})" if len(runs) > 1 else problem.name
        print(f"[{number}/{count}] {name}  {record['wall_seconds']:.1f} s  {outcome}", file=sys.stderr)
    for kind, path in files.items():
        if reused[kind]:
            total = count // len(files)
            print(
                f"{reused[kind]} of {total} results are from before ({path}); --fresh makes them again", file=sys.stderr
            )
