"""``mtmc report``: a stored run as text, as JSON or as a page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from mtmc_lsp.commands.options import AsJson, write_output

if TYPE_CHECKING:
    from mtmc_lsp.search.stored_run import StoredRun


def report(
    run: Annotated[str, typer.Argument(metavar="[RUN]", help="A run's id or its beginning; else the newest.")] = "",
    html: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--html", metavar="FILE", help="Write one page there that needs no network."),
    ] = None,
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
        _show(stored)
    return 0


def _show(stored: StoredRun) -> None:
    from mtmc_lsp.report import text

    out = text.console()
    record = stored.record
    out.print(f"{record.qualname}  {record.path}")
    for step in stored.steps:
        text.show_step(out, step, diff=False)
    if stored.result is not None:
        text.show_result(out, stored.result)
    else:
        out.print(f"\nrun {record.id} is not finished: continue with mtmc optimize --resume {record.id}")
