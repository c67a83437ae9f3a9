"""``mtmc export RUN``: a run's last accepted version as a file of its own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from mtmc_lsp.commands.options import AsJson, check_choice, write_output
from mtmc_lsp.core.errors import Location, RequestError


def export(
    run: Annotated[str, typer.Argument(help="A run's id, see `mtmc runs`.")],
    form: Annotated[str, typer.Option("--format", help="The form of the file: kernelbench.")] = "kernelbench",
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--out", help="Where to write it; else standard output."),
    ] = None,
    reference: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--reference", help="Where to write your own code in the same form, to compare with."),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Write a run's last good version as a self-contained file."""
    from mtmc_lsp.app.export import kernelbench, kernelbench_reference
    from mtmc_lsp.app.stored_runs import open_project_store
    from mtmc_lsp.report.documents import document

    check_choice("format", form, ("kernelbench",))
    with open_project_store() as store:
        result = store.result(run)
    if result is None:
        raise RequestError(
            f"there is no finished run {run!r}", where=Location(str(store.folder)), remedy="See `mtmc runs`."
        )
    source = kernelbench(result)
    reference_source = kernelbench_reference(result) if reference is not None else ""
    for path, text in ((out, source), (reference, reference_source)):
        if path is not None:
            write_output(path, text)
    if as_json:
        print(document(run=run, format=form, path=str(out) if out else None, source=source))
    elif out is None:
        sys.stdout.write(source)
    return 0
