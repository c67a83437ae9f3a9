"""``mtmc report``: a run that is over, as text, as JSON or as a page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from mtmc_lsp.core.errors import Location, RequestError

if TYPE_CHECKING:
    from mtmc_lsp.search.stored_run import StoredRun


def report(
    run: Annotated[str, typer.Argument(metavar="[RUN]", help="A run's id or its beginning; else the newest.")] = "",
    html: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--html", metavar="FILE", help="Write one page there that needs no network."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")] = False,
) -> int:
    """Show a run that is stored: its steps, how they were verified and timed, and what they brought."""
    from mtmc_lsp.app.pipeline import open_store
    from mtmc_lsp.report.documents import document, run_document
    from mtmc_lsp.report.page import render
    from mtmc_lsp.report.run_page import stored_page
    from mtmc_lsp.search.stored_run import stored_run

    # Any file of a project names it.
    with open_store(Path.cwd() / "x.py") as store:
        found = stored_run(store, run)
    if html is not None:
        _write(html, render(stored_page(found)))
    if as_json:
        record = found.record
        whole = run_document(found.result) if found.result is not None else document(run=record, steps=found.steps)
        print(whole)
    elif html is not None:
        print(html)
    else:
        _show(found)
    return 0


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RequestError(
            f"cannot be written: {error.strerror}", where=Location(str(path)), remedy="Choose another file."
        ) from None


def _show(found: StoredRun) -> None:
    from mtmc_lsp.report import text

    out = text.console()
    record = found.record
    out.print(f"{record.qualname}  {record.path}")
    for step in found.steps:
        text.show_action(out, step.index, step.action)
        text.show_step(out, step, diff=False)
    if found.result is not None:
        text.show_result(out, found.result)
    else:
        out.print(f"\nrun {record.id} is not finished: go on with mtmc optimize --resume {record.id}")
