"""Registers the commands of ``mtmc``."""

from __future__ import annotations

from typing import Annotated

import typer

from mtmc_lsp import __version__
from mtmc_lsp.commands.bench import bench
from mtmc_lsp.commands.calibrate import calibrate
from mtmc_lsp.commands.consent import consent
from mtmc_lsp.commands.doctor import doctor
from mtmc_lsp.commands.export import export
from mtmc_lsp.commands.lsp import lsp
from mtmc_lsp.commands.optimize import optimize
from mtmc_lsp.commands.plan import plan
from mtmc_lsp.commands.profile import profile
from mtmc_lsp.commands.record import record
from mtmc_lsp.commands.report import report
from mtmc_lsp.commands.runs import runs
from mtmc_lsp.commands.verify import verify
from mtmc_lsp.commands.why import why

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Turn PyTorch functions into verified Triton kernels, step by step.",
)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"mtmc {__version__}")
        raise typer.Exit


@app.callback()
def _global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Turn PyTorch functions into verified Triton kernels, step by step."""


# In the order of `mtmc --help`.
_COMMANDS = (
    report, consent, optimize, plan, record, runs, export, verify, why, doctor, lsp, bench, profile, calibrate,
)  # fmt: skip
for _command in _COMMANDS:
    app.command()(_command)
