"""``mtmc report``: a stored run as text, as JSON or as a page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from mtmc_lsp.commands.options import AsJson, Verbose, write_output

if TYPE_CHECKING:
    from mtmc_lsp.search.stored_run import StoredRun


def report(
    run: Annotated[str, typer.Argument(metavar="[RUN]", help="A run's id or its beginning; else the newest.")] = "",
    html: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--html", metavar="FILE", help="Write one page there that needs no network."),
    ] = None,
    diff: Annotated[bool, typer.Option(help="Show each step's diff.")] = False,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> int:
    """Show a stored run: its steps, how they were verified and timed, and what they gained."""
    from mtmc_lsp.app.stored_runs import open_project_store
    from mtmc_lsp.report.documents import document, run_document
    from mtmc_lsp.report.page import render
    from mtmc_lsp.report.run_page import stored_page
    from mtmc_lsp.search.stored_run import stored_run

    with open_project_store() as store:
        stored = stored_run(store, run)
    if html is not None:
        write_output(html, render(stored_page(stored)))
    if as_json:
        result = stored.result
        print(run_document(result) if result is not None else document(run=stored.record, steps=stored.steps))
    elif html is not None:
        print(html)
    else:
        _show(stored, diff=diff, verbose=verbose)
    return 0


def _show(stored: StoredRun, *, diff: bool, verbose: bool) -> None:
    from mtmc_lsp.report.console import console, short_path, show
    from mtmc_lsp.report.run_text import RunText
    from mtmc_lsp.report.search_tree import show_tree

    out = console()
    record, shown = stored.record, RunText(out, verbose=verbose, diff=diff)
    show(out, f"{record.qualname} in {short_path(record.path)}")
    for step in stored.steps:
        shown.step(step)
    if stored.result is not None:
        for note in stored.result.notes:
            shown.note(note)
        shown.result(stored.result)
        shown.next_commands(stored.result, applied=False)
    else:
        if verbose:
            show_tree(out, stored.steps)
        show(out, f"run {record.id} is not finished: continue with {stored.resume_command}")
