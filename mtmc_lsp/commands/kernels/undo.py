"""``mtmc undo``: take what a run wrote out of the user's file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mtmc_lsp.commands.options import AsJson, Python, open_spec
from mtmc_lsp.core.errors import RequestError


def undo(
    run: Annotated[str, typer.Argument(metavar="[RUN]", help="A run's id or its beginning; else the newest.")] = "",
    python: Python = "",
    as_json: AsJson = False,
) -> int:
    """Take the kernels or the edits of a run out of its file; the text before is kept as a backup."""
    from mtmc_lsp.app.stored_runs import open_project_store
    from mtmc_lsp.app.target_file import check_inside_project
    from mtmc_lsp.app.undo import undo_result
    from mtmc_lsp.report.console import console
    from mtmc_lsp.report.documents import document
    from mtmc_lsp.report.run_text import show_written
    from mtmc_lsp.search.stored_run import stored_run

    with open_project_store() as store:
        stored = stored_run(store, run)
    record, result = stored.record, stored.result
    if result is None:
        raise RequestError(f"run {record.id} is not finished", remedy="Choose another run; see `mtmc runs`.")
    target = open_spec(f"{record.path}::{record.qualname}", python, None)
    check_inside_project(target, Path.cwd())
    written = undo_result(target, result)
    if as_json:
        print(document(run=record.id, path=str(target.path), backup=str(written.backup)))
    else:
        show_written(console(), target.path, written)
    return 0
