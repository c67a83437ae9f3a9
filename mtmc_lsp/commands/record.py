"""``mtmc record -- COMMAND``: run a program and record how its functions are called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from mtmc_lsp.commands.options import AsJson


def record(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND", help="What to run: -- python train.py ...")],
    target: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(metavar="FILE::NAME", help="Record only this target; may be repeated."),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Run a command and note how your functions and kernels are called with tensors: shapes and ranges, never data."""
    from mtmc_lsp.app.record import record as run_recorded
    from mtmc_lsp.report.console import console
    from mtmc_lsp.report.documents import document
    from mtmc_lsp.report.text import show_recording

    recording = run_recorded(command, Path.cwd(), target or (), quiet=as_json)
    if as_json:
        print(
            document(
                command=recording.command,
                exit_code=recording.exit_code,
                targets=recording.targets,
                kernels=recording.kernels,
            )
        )
    show_recording(console(stderr=True) if as_json else console(), recording)
    return recording.exit_code or (0 if recording.targets or recording.kernels else 1)
