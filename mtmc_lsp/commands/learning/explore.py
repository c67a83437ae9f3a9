"""``mtmc explore SUITE --out DIR``: try actions on programs, and store what came of them, for policies to learn from."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from mtmc_lsp.commands.options import AsJson, Cluster, Python, check_choice, read_project_settings
from mtmc_lsp.core.errors import RequestError

if TYPE_CHECKING:
    from mtmc_lsp.app.bench.jobs import Jobs
    from mtmc_lsp.app.bench.suite import Problem
    from mtmc_lsp.explore.runner import Explored, Plan

SECONDS, DEPTH, WIDTH = 600.0, 6, 8
CPU_ARCH = "sm_90"
"""Compiled for if there is no GPU: one architecture, because each takes as long again."""
CORES_PER_JOB = 2
MAX_JOBS_PER_GPU = 8


def explore(
    suite: Annotated[
        str, typer.Argument(metavar="[SUITE]", help="A folder or file of programs, or a suite: public, everyday.")
    ] = "",
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--out", metavar="DIR", help="The folder of transitions; what is in it is not measured again."),
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", min=1, help="Time for all programs together.")] = SECONDS,
    jobs: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--jobs", min=1, help="Programs at a time; timing is one at a time on each GPU."),
    ] = None,
    depth: Annotated[int, typer.Option("--depth", min=1, help="Most actions one after the other.")] = DEPTH,
    width: Annotated[int, typer.Option("--width", min=1, help="Most actions tried on one version.")] = WIDTH,
    limit: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--limit", min=1, help="At most so many programs."),
    ] = None,
    pattern: Annotated[str, typer.Option("--filter", help="Only programs named so: norm/*, or a part.")] = "",
    half: Annotated[str, typer.Option("--half", help="Of a suite of installed packages: looking or reporting.")] = "",
    seed: Annotated[int, typer.Option("--seed", help="Of the random choices.")] = 0,
    arch: Annotated[
        str, typer.Option("--arch", help="Compile for these, comma-separated, where there is no GPU.")
    ] = CPU_ARCH,
    show: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--show", metavar="DIR", help="Only summarise this folder of transitions."),
    ] = None,
    cluster: Cluster = "",
    python: Python = "",
    as_json: AsJson = False,
) -> int:
    """Grow a tree of versions for each program, and store each action that was tried with its outcome."""
    from mtmc_lsp.explore.summary import summarise
    from mtmc_lsp.report.console import console
    from mtmc_lsp.report.documents import document
    from mtmc_lsp.report.transition_tables import show_store

    if show is not None and (suite or out is not None):
        raise RequestError("--show only summarises a folder", remedy="Leave out SUITE and --out.")
    explored = []
    if show is None:
        if not suite or out is None:
            raise RequestError("SUITE or --out is missing", remedy="Write mtmc explore SUITE --out DIR.")
        place = _place(suite)
        problems = _problems(place, half, out, pattern, limit)
        plan = _plan(place, problems, out, arch, python, seconds=seconds, depth=depth, width=width, seed=seed)
        if cluster and jobs is not None:
            raise RequestError("a worker of a cluster explores one program at a time", remedy="Leave out --jobs.")
        explored = _explore(problems, place, plan, jobs, cluster)
    folder = show or out
    assert folder is not None
    summary = summarise(folder)
    if as_json:
        print(document(summary=summary, folder=str(folder)))
    else:
        show_store(console(), summary)
    return 1 if explored and all(item.answer.reason and not item.answer.total for item in explored) else 0


def _place(suite: str) -> Path:
    """The folder or file of programs, or the folder of a suite of this tool's repository."""
    from mtmc_lsp.app.bench.opening import named_suite

    place = Path(suite)
    return place if place.exists() or len(place.parts) > 1 else named_suite(suite)


def _problems(place: Path, half: str, out: Path, pattern: str, limit: int | None) -> list[Problem]:
    from mtmc_lsp.app.bench.manifest import HALVES
    from mtmc_lsp.app.bench.opening import suite_problems
    from mtmc_lsp.app.bench.suite import Shard, choose

    if half:
        check_choice("half", half, HALVES)
    problems = choose(suite_problems(place, half, out), pattern, limit, Shard())
    if not problems:
        raise RequestError("no program is left", remedy="Change --filter.")
    return problems


def _plan(
    place: Path,
    problems: list[Problem],
    out: Path,
    arch: str,
    python: str,
    *,
    seconds: float,
    depth: int,
    width: int,
    seed: int,
) -> Plan:
    from mtmc_lsp.app.bench.opening import suite_python
    from mtmc_lsp.explore.families import families_of
    from mtmc_lsp.explore.runner import Plan

    folder = place if place.is_dir() else place.parent
    settings = read_project_settings(folder.absolute(), arch)
    interpreter = suite_python(place, problems[0], settings, python)
    return Plan(settings, interpreter, families_of(place), out, seconds=seconds, depth=depth, width=width, seed=seed)


def _explore(problems: list[Problem], place: Path, plan: Plan, jobs: int | None, cluster: str) -> list[Explored]:
    """Explore the programs, and print one line for each."""
    from mtmc_lsp.app.bench.opening import with_files
    from mtmc_lsp.cluster.opening import merge
    from mtmc_lsp.explore.parquet import compact, only_writer
    from mtmc_lsp.explore.runner import Exploration

    explored: list[Explored] = []
    began = time.monotonic()
    with only_writer(plan.out):
        problems = with_files(problems, place, plan.python)
        with _places(problems, plan, jobs, cluster) as places:
            runs = {kind: Exploration(plan, here).run(problems) for kind, here in places.items()}
            count = len(problems) * len(runs)
            for number, (kind, item) in enumerate(merge(runs), 1):
                explored.append(item)
                print(f"[{number}/{count}] {_line(item, kind if len(runs) > 1 else '')}", file=sys.stderr)
        compact(plan.out)
    print(_throughput(explored, time.monotonic() - began), file=sys.stderr)
    if len(explored) < count:
        print(
            f"{count - len(explored)} programs are left; run the command again to go on, or with more --seconds",
            file=sys.stderr,
        )
    return explored


@contextlib.contextmanager
def _places(problems: list[Problem], plan: Plan, jobs: int | None, cluster: str) -> Iterator[Mapping[str, Jobs]]:
    """Where programs are explored: this machine, or the workers of a cluster by the kind of their GPUs."""
    from mtmc_lsp.app.bench.jobs import LocalJobs
    from mtmc_lsp.app.bench.runner import visible_devices
    from mtmc_lsp.app.calibrate import calibrate_first
    from mtmc_lsp.process.fork_server import ForkServer, likely_variables
    from mtmc_lsp.process.priority import usable_cores

    if cluster:
        from mtmc_lsp.cluster.opening import open_cluster

        with open_cluster(cluster, problems, plan.settings, plan.python) as session:
            yield {kind: session.jobs(kind) for kind in session.kinds}
        return
    devices, cores = visible_devices(), len(usable_cores())
    most = MAX_JOBS_PER_GPU * len(devices) if devices else cores
    jobs = jobs or max(1, min(most, cores // CORES_PER_JOB))
    with (
        ForkServer(plan.python, likely_variables(), preload=True) as fork_server,
        LocalJobs(jobs, devices, fork_server) as local,
    ):
        calibrate_first(plan.python, devices, fork_server)
        yield {"": local}


def _throughput(explored: list[Explored], seconds: float) -> str:
    """One line about the command: its transitions a second, and the stages that took the time of all processes."""
    stages: Counter[str] = Counter()
    for item in explored:
        stages.update(item.answer.stages)
    added = sum(item.answer.added for item in explored)
    spent = ", ".join(f"{name} {taken:.1f} s" for name, taken in stages.most_common() if taken >= 0.1)
    rate = f"{added} transitions in {seconds:.1f} s, {added / seconds:.2f} a second"
    return f"{rate}; {spent}" if spent else rate


def _line(item: Explored, kind: str) -> str:
    """One line about an explored program: how long it took, and what was tried.

    Args:
        kind: the GPU, if the cluster has several kinds.
    """
    answer = item.answer
    outcomes = ", ".join(f"{count} {name}" for name, count in sorted(answer.outcomes.items()))
    added = f"{answer.added} transitions" + (f": {outcomes}" if outcomes else "")
    parts = [
        f"{item.problem.name}{f' ({kind})' if kind else ''}  {item.seconds:.1f} s",
        added if answer.added or not answer.reason else "",
        answer.reason,
    ]
    return "  ".join(part for part in parts if part)
