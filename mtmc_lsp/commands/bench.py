"""``mtmc bench DIR``: every problem of a folder, and what the results come to."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from mtmc_lsp.core.errors import RequestError

DEFAULT_OUT = Path("results.jsonl")
SECONDS = 600.0
"""Most seconds of one problem, unless told otherwise."""
MOST_JOBS = 4


def bench(
    folder: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Argument(metavar="DIR", help="A folder of problems: files with `Model` and `get_inputs`."),
    ] = None,
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
    arch: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--arch", help="Compile for these, comma-separated, where there is no GPU."),
    ] = None,
    max_autotune: Annotated[
        Optional[bool],  # noqa: UP045
        typer.Option("--max-autotune", help="Time torch.compile(mode='max-autotune') too, which takes minutes."),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Run again what is in the file already.")] = False,
    python: Annotated[str, typer.Option("--python", help="The interpreter that the problems run under.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")] = False,
) -> int:
    """Optimise every problem of a folder; each result is a line of a file, and a run that was ended goes on."""
    from mtmc_lsp.app.bench import chosen, find_problems, parse_shard, read_results
    from mtmc_lsp.app.bench_summary import summarise
    from mtmc_lsp.report.bench_tables import show_summary
    from mtmc_lsp.report.documents import document
    from mtmc_lsp.report.text import console

    if summary is not None and not summary.is_file():
        raise RequestError(f"there is no file {summary}", remedy="Name what --out wrote.")
    if folder is None and summary is None:
        raise RequestError("which problems?", remedy="Name a folder: mtmc bench DIR.")
    problems = find_problems(folder) if folder is not None else []
    problems = chosen(problems, pattern, limit, parse_shard(shard))
    if folder is not None and not problems:
        raise RequestError("no problem is left", remedy="Change --filter or --shard.")
    if summary is None:
        assert folder is not None
        _run(folder, problems, out, jobs, seconds, (budget, arch, max_autotune), python, fresh)
    asked = [(problem.name, problem.level) for problem in problems]
    names = {name for name, _ in asked}
    records = [r for r in read_results(summary or out) if not asked or r["problem"] in names]
    found = summarise(records, asked)
    if as_json:
        print(document(summary=found, results=str(summary or out)))
    else:
        show_summary(console(), found)
    return 0 if found.scores[0].correct else 1


def _run(
    folder: Path,
    problems: list,  # type: ignore[type-arg]  # the class is imported where it is used, so that the command line starts fast
    out: Path,
    jobs: Optional[int],  # noqa: UP045
    seconds: float,
    changes: tuple[Optional[float], Optional[str], Optional[bool]],  # noqa: UP045
    python: str,
    fresh: bool,
) -> None:
    from mtmc_lsp.app.bench import Bench, Plan, describe_environment, visible_devices
    from mtmc_lsp.app.bench_summary import why_nothing
    from mtmc_lsp.app.interpreter import checked_python, find_python
    from mtmc_lsp.core.settings import override_settings, read_settings
    from mtmc_lsp.process.fork_server import ForkServer, likely_variables
    from mtmc_lsp.process.priority import usable_cores

    budget, arch, tune = changes
    archs = tuple(name.strip() for name in arch.split(",")) if arch is not None else None
    settings = override_settings(
        read_settings(folder.absolute()), budget_seconds=budget, archs=archs, max_autotune=tune
    )
    interpreter = checked_python(python or find_python(problems[0].path, settings))
    devices = visible_devices()
    plan = Plan(settings, interpreter, seconds, describe_environment(interpreter))
    jobs = jobs or min(MOST_JOBS, max(1, len(usable_cores()) // 4)) * max(1, len(devices))
    old = 0
    with ForkServer(interpreter, likely_variables(), preload=True) as fork_server:
        bench = Bench(plan, out, jobs=jobs, devices=devices, fork_server=fork_server)
        for number, (problem, record, known) in enumerate(bench.run(problems, fresh=fresh), 1):
            old += known
            if not known:
                reason = why_nothing(record).splitlines()[:1]
                told = f"{record['status']}{': ' + reason[0] if reason else ''}"
                print(
                    f"[{number}/{len(problems)}] {problem.name}  {record['wall_seconds']:.1f} s  {told}",
                    file=sys.stderr,
                )
    if old:
        print(f"{old} of {len(problems)} results are from before ({out}); --fresh makes them again", file=sys.stderr)
