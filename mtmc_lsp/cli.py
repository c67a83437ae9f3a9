"""``mtmc``: optimise, plan, list runs, export and check the environment from a terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from mtmc_lsp import __version__
from mtmc_lsp.core.errors import Location, MtmcError, RequestError
from mtmc_lsp.core.run import SCHEMA, RunResult, RunStatus

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Turn PyTorch functions into verified Triton kernels."
)

Spec = Annotated[str, typer.Argument(metavar="FILE::NAME", help="The function, method, module or kernel.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]
Python = Annotated[str, typer.Option("--python", help="The interpreter that your code runs under.")]
Arch = Annotated[
    Optional[str], typer.Option("--arch", help="Compile for these, comma-separated, where there is no GPU.")
]


def main() -> None:
    """Entry point of ``mtmc``."""
    app()


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mtmc {__version__}")
        raise typer.Exit


@app.callback()
def _options(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False) -> None:
    """Turn PyTorch functions into verified Triton kernels."""


def _guarded(as_json: bool, work: Callable[[], int]) -> None:
    """Run a command; a user's error is printed as the contract says, and gives the exit code."""
    try:
        code = work()
    except MtmcError as error:
        if as_json:
            print(json.dumps({"schema": SCHEMA, "error": error.to_json()}))
        else:
            print(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        print("interrupted; what was done is stored: go on with --resume", file=sys.stderr)
        code = 130
    raise typer.Exit(code)


def _choice(option: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise RequestError(f"--{option} {value} does not exist", remedy=f"There is {' and '.join(known)}.")


def _request(spec: str, python: str, arch: str | None, **changes: Any) -> Any:
    from mtmc_lsp.core.settings import read_settings
    from mtmc_lsp.search.session import parse_request

    settings = read_settings(Path(spec.partition("::")[0]).resolve().parent)
    if arch:
        settings = replace(settings, archs=tuple(arch.split(",")))
    settings = replace(settings, **{name: value for name, value in changes.items() if value is not None})
    return parse_request(spec, settings, python)


@app.command()
def optimize(
    spec: Spec,
    planner: Annotated[str, typer.Option(help="Who chooses the next step.")] = "roofline",
    coder: Annotated[str, typer.Option(help="Who writes it.")] = "builtin",
    search: Annotated[str, typer.Option(help="How the space is searched.")] = "greedy",
    budget: Annotated[Optional[float], typer.Option(help="Most seconds for the run.")] = None,
    arch: Arch = None,
    python: Python = "",
    apply: Annotated[bool, typer.Option("--apply", help="Write the accepted steps into the file.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the target's unfinished run.")] = False,
    diff: Annotated[bool, typer.Option(help="Show each step's diff.")] = True,
    as_json: AsJson = False,
) -> None:
    """Optimise a target step by step; every step is verified, and timed where there is a GPU."""

    def work() -> int:
        from rich.console import Console

        from mtmc_lsp.core.jsonable import to_json
        from mtmc_lsp.report.text import show_action, show_result, show_step
        from mtmc_lsp.search import session
        from mtmc_lsp.search.greedy import Events

        _choice("planner", planner, ("roofline",))
        _choice("coder", coder, ("builtin",))
        _choice("search", search, ("greedy",))
        opened = session.open_target(_request(spec, python, arch, budget_seconds=budget))
        console = Console(stderr=as_json)
        with console.status("capturing the target") as status:
            capture = session.capture_target(opened)
            store = session.open_store(opened)
            if not as_json:
                _show_head(console, opened.target.qualname, capture)
            events = Events(
                on_action=lambda index, action: show_action(console, index, action),
                on_stage=lambda text: status.update(text),
                on_step=lambda step: show_step(console, step, diff=diff and not as_json),
            )
            result = session.optimize(opened, capture, store, events, resume=resume)
        show_result(console, result)
        if apply:
            backup = session.apply(opened, result)
            console.print(f"  written to {opened.request.path}; the text before is kept in {backup}" if backup else "")
        store.close()
        if as_json:
            print(json.dumps(to_json(result)))
        return 0 if result.status in (RunStatus.IMPROVED, RunStatus.UNMEASURED) else 1

    _guarded(as_json, work)


def _show_head(console: Any, name: str, capture: Any) -> None:
    env = capture.environment
    device = env.gpu or "no CUDA GPU: steps are verified by Triton's interpreter and not timed"
    sizes = ", ".join(f"{k}={v}" for k, v in capture.graph.sizes.items())
    console.print(f"[bold]{name}[/bold]  {len(capture.graph.nodes)} operations, {sizes}")
    console.print(
        f"  {device}; torch {env.torch}, triton {env.triton}; workload from {capture.workload.source.value}",
        style="dim",
    )


@app.command()
def plan(spec: Spec, arch: Arch = None, python: Python = "", as_json: AsJson = False) -> None:
    """Show what would be tried first, best first, with reasons; nothing is written."""

    def work() -> int:
        from rich.console import Console
        from rich.table import Table

        from mtmc_lsp.core.jsonable import to_json
        from mtmc_lsp.search import session

        opened = session.open_target(_request(spec, python, arch))
        capture = session.capture_target(opened)
        actions = session.plan(opened, capture)
        if as_json:
            print(json.dumps({"schema": SCHEMA, "target": to_json(opened.target), "actions": to_json(tuple(actions))}))
        else:
            table = Table("step", "why", "predicted gain", box=None, padding=(0, 2))
            for action in actions:
                table.add_row(action.text, action.rationale, f"{action.expected.saved_us:.0f} us (estimate)")
            Console().print(table)
        return 0 if actions else 1

    _guarded(as_json, work)


@app.command()
def runs(as_json: AsJson = False) -> None:
    """List the project's runs, newest first."""

    def work() -> int:
        import datetime

        from rich.console import Console
        from rich.table import Table

        from mtmc_lsp.capture.loading_paths import project_root
        from mtmc_lsp.core.jsonable import to_json
        from mtmc_lsp.search.store import Store

        store = Store(project_root(Path.cwd() / "x") / ".mtmc")
        records = store.runs()
        store.close()
        if as_json:
            print(json.dumps({"schema": SCHEMA, "runs": to_json(tuple(records))}))
            return 0
        table = Table("run", "target", "status", "steps", "started", box=None, padding=(0, 2))
        for record in records:
            started = datetime.datetime.fromtimestamp(record.started).strftime("%Y-%m-%d %H:%M")
            name = f"{Path(record.path).name}::{record.qualname}"
            table.add_row(record.id, name, record.status.value, str(record.steps), started)
        Console().print(table)
        return 0

    _guarded(as_json, work)


@app.command()
def export(
    run: Annotated[str, typer.Argument(help="A run's id, see `mtmc runs`.")],
    format: Annotated[str, typer.Option("--format", help="The form of the file.")] = "kernelbench",
    out: Annotated[Optional[Path], typer.Option("--out", help="Where to write it; standard output by default.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a run's last good version as a self-contained file."""

    def work() -> int:
        from mtmc_lsp.capture.loading_paths import project_root
        from mtmc_lsp.search.export import kernelbench
        from mtmc_lsp.search.store import Store

        _choice("format", format, ("kernelbench",))
        store = Store(project_root(Path.cwd() / "x") / ".mtmc")
        result = _finished(store.result(run), run)
        store.close()
        text = kernelbench(result)
        if out is not None:
            out.write_text(text, encoding="utf-8")
        if as_json:
            print(json.dumps({"schema": SCHEMA, "format": format, "path": str(out) if out else None, "source": text}))
        elif out is None:
            print(text, end="")
        return 0

    _guarded(as_json, work)


def _finished(result: RunResult | None, run: str) -> RunResult:
    if result is None:
        raise RequestError(f"no finished run {run!r}", where=Location(str(Path.cwd())), remedy="See `mtmc runs`.")
    return result


@app.command()
def doctor(python: Python = "", as_json: AsJson = False) -> None:
    """Check what the tool needs, and say what to do about what is missing."""

    def work() -> int:
        from mtmc_lsp.search.doctor import check_environment

        findings = check_environment(python)
        if as_json:
            from mtmc_lsp.core.jsonable import to_json

            print(json.dumps({"schema": SCHEMA, "findings": to_json(tuple(findings))}))
        else:
            for finding in findings:
                print(f"{'ok ' if finding.ok else 'NO '} {finding.name}: {finding.detail}")
                if not finding.ok and finding.remedy:
                    print(f"     {finding.remedy}")
        return 0 if all(finding.ok or not finding.required for finding in findings) else 3

    _guarded(as_json, work)
