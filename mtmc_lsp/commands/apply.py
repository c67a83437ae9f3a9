"""``mtmc apply``: write the kernels of a stored run into the user's file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mtmc_lsp.commands.options import AsJson, Python, open_spec
from mtmc_lsp.core.errors import RequestError


def apply(
    run: Annotated[str, typer.Argument(metavar="[RUN]", help="A run's id or its beginning; else the newest.")] = "",
    python: Python = "",
    as_json: AsJson = False,
) -> int:
    """Write the kernels of a finished run into its file; the text before is kept as a backup."""
    from mtmc_lsp.app.stored_runs import open_project_store, result_in_current_text
    from mtmc_lsp.app.target_file import apply_result, check_inside_project
    from mtmc_lsp.core.action import ActionKind
    from mtmc_lsp.core.run import KEPT
    from mtmc_lsp.report.console import console, short_path, show_commands
    from mtmc_lsp.report.documents import document
    from mtmc_lsp.report.run_text import show_written
    from mtmc_lsp.search.stored_run import stored_run

    with open_project_store() as store:
        stored = stored_run(store, run)
    record, result = stored.record, stored.result
    if result is None:
        raise RequestError(f"run {record.id} is not finished", remedy=f"Continue it: {stored.resume_command}.")
    if result.status not in KEPT:
        raise RequestError(
            f"run {record.id} kept no kernels ({result.status.value})", remedy="Choose another run; see `mtmc runs`."
        )
    target = open_spec(f"{record.path}::{record.qualname}", python, None)
    check_inside_project(target, Path.cwd())
    written = apply_result(target, result_in_current_text(result, target))
    assert written is not None, "the run kept kernels"
    if as_json:
        kernels = str(written.kernels) if written.kernels is not None else None
        print(document(run=record.id, path=str(target.path), kernels=kernels, backup=str(written.backup)))
    else:
        out = console()
        show_written(out, target.path, written)
        spec = f"{short_path(target.path)}::{target.qualname}"
        is_edit = any(step.action.kind is ActionKind.EDIT for step in result.steps)
        undo = (f"mtmc undo {record.id}", "take the edits out of the file again")
        why = (f"mtmc why {spec}", "whether the kernels run, and what refuses them")
        show_commands(out, [undo if is_edit else why])
    return 0
