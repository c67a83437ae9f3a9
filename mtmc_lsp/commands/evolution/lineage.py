"""``mtmc lineage RUN``: all versions of an evolution, as text, as a page or as a git repository; show, compare or keep one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from mtmc_lsp.commands.options import AsJson, Python, Verbose, open_spec, write_output
from mtmc_lsp.core.errors import RequestError

if TYPE_CHECKING:
    from mtmc_lsp.evolve.lineage import Version
    from mtmc_lsp.evolve.stored import StoredEvolution


def lineage(
    run: Annotated[
        str, typer.Argument(metavar="[RUN]", help="An evolution's id or its beginning; else the newest.")
    ] = "",
    html: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--html", metavar="FILE", help="Write one page there that needs no network."),
    ] = None,
    git: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--git", metavar="DIR", help="Write a repository there with a commit for each version."),
    ] = None,
    show: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--show", metavar="VERSION", min=0, help="Print this version of the file."),
    ] = None,
    against: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--against", metavar="VERSION", min=0, help="With --show: print the diff from this version."),
    ] = None,
    keep: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--keep", metavar="VERSION", min=0, help="Verify this version, and write it into the file."),
    ] = None,
    python: Python = "",
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> int:
    """Show the versions of an evolution with parents, scores and reasons, and how the best one got faster."""
    from mtmc_lsp.app.stored_runs import open_project_store
    from mtmc_lsp.evolve.keeping import no_such_version
    from mtmc_lsp.evolve.stored import stored_evolution
    from mtmc_lsp.report.console import console
    from mtmc_lsp.report.lineage.document import lineage_document
    from mtmc_lsp.report.lineage.git import write_repository
    from mtmc_lsp.report.lineage.page import lineage_page
    from mtmc_lsp.report.lineage.text import show_lineage
    from mtmc_lsp.report.page import render

    if against is not None and show is None:
        raise RequestError("--against needs --show", remedy="Write mtmc lineage RUN --show VERSION --against VERSION.")
    if keep is not None and show is not None:
        raise RequestError("--show and --keep are both set", remedy="Choose one.")
    with open_project_store() as store:
        stored = stored_evolution(store, run)
    for number in (show, against, keep):
        if number is not None and number >= len(stored.lineage.versions):
            raise no_such_version(number, stored.lineage, stored.record.id, stored.record.path)
    if keep is not None:
        return _keep(stored, keep, python, as_json=as_json)
    if html is not None:
        write_output(html, render(lineage_page(stored)))
    commits = write_repository(stored, git) if git is not None else 0
    if show is not None:
        _print_version(stored, show, against)
    elif as_json:
        print(lineage_document(stored.record.id, stored.setup, stored.lineage))
    elif html is not None or git is not None:
        for place, text in ((html, ""), (git, f": {commits} commits")):
            if place is not None:
                print(f"{place}{text}")
    else:
        show_lineage(console(), stored, verbose=verbose)
    return 0


def _source(stored: StoredEvolution, number: int) -> str:
    """The file with a version.

    Raises:
        RequestError: the version was not written.
    """
    version: Version = stored.lineage.version(number)
    if version.candidate is None:
        raise RequestError(f"version {number} was not written: {version.reason}", remedy="Choose another version.")
    return version.candidate.source


def _print_version(stored: StoredEvolution, number: int, against: int | None) -> None:
    from mtmc_lsp.source.compose import unified_diff

    text = _source(stored, number)
    if against is not None:
        text = unified_diff(_source(stored, against), text, Path(stored.record.path).name)
    print(text, end="" if text.endswith("\n") else "\n")


def _keep(stored: StoredEvolution, number: int, python: str, *, as_json: bool) -> int:
    """Verify a version as a whole, store it as a run, and write it into the file."""
    from mtmc_lsp.app.target_file import apply_result, check_inside_project
    from mtmc_lsp.core.run import KEPT
    from mtmc_lsp.evolve.keeping import keep_version
    from mtmc_lsp.report.console import console, live, show, show_commands
    from mtmc_lsp.report.documents import run_document
    from mtmc_lsp.report.run_text import RunText, show_written
    from mtmc_lsp.search.components import Events

    _source(stored, number)
    target = open_spec(f"{stored.record.path}::{stored.record.qualname}", python)
    check_inside_project(target, Path.cwd())
    out = console(stderr=as_json)
    shown = RunText(out)
    shown.start(target.qualname, target.path, target.settings.budget_seconds)
    with live(out, shown.line):
        events = Events(on_stage=shown.line.enter, on_step=shown.step, on_withdrawn=shown.withdrawn)
        result = keep_version(stored, number, target, events)
    shown.result(result)
    written = apply_result(target, result) if result.status in KEPT else None
    if written is not None:
        show_written(out, target.path, written)
        show_commands(
            out, [(f"mtmc report {result.id}", "the steps of this version; an editor takes single ones back")]
        )
    else:
        show(out, f"version {number} was not kept, and the file stays as it is", style="yellow")
    if as_json:
        print(run_document(result))
    return 0 if written is not None else 1
