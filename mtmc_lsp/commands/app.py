"""Registers the commands of ``mtmc``."""

from __future__ import annotations

from typing import Annotated

import typer

from mtmc_lsp import __version__
from mtmc_lsp.commands.apply import apply
from mtmc_lsp.commands.bench import bench
from mtmc_lsp.commands.calibrate import calibrate
from mtmc_lsp.commands.consent import consent
from mtmc_lsp.commands.doctor import doctor
from mtmc_lsp.commands.evolution.evolve import evolve
from mtmc_lsp.commands.evolution.knowledge import knowledge
from mtmc_lsp.commands.evolution.lineage import lineage
from mtmc_lsp.commands.export import export
from mtmc_lsp.commands.kernels.repair import repair
from mtmc_lsp.commands.kernels.undo import undo
from mtmc_lsp.commands.learning.explore import explore
from mtmc_lsp.commands.learning.programs import programs
from mtmc_lsp.commands.learning.train import train
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
    invoke_without_command=True,
    help="Turn PyTorch functions into verified Triton kernels, step by step.",
)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"mtmc {__version__}")
        raise typer.Exit


GUIDE = (
    ("mtmc doctor", "check this machine, and what to do about what is missing"),
    ("mtmc optimize FILE", "list the functions and modules of a file"),
    ("mtmc optimize FILE::NAME", "optimize one of them step by step; the file stays as it is"),
    ("mtmc apply", "write the kernels of the newest run into the file"),
    ("mtmc report --html run.html", "see its diffs, checks and times as a page"),
    ("mtmc verify FILE::NAME FILE::NAME", "check any other kernel against your PyTorch code"),
    ("mtmc repair FILE::KERNEL", "detect and repair faults of a Triton kernel"),
    ("mtmc --help", "all commands; mtmc COMMAND --help shows the options of one"),
)
"""What ``mtmc`` alone shows: the commands to begin with, in the order of use."""


def _show_guide() -> None:
    from mtmc_lsp.report.console import console, show, show_commands

    out = console()
    show(out, "mtmc turns PyTorch functions into verified Triton kernels, step by step.")
    show_commands(out, GUIDE)


@app.callback()
def _global_options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Turn PyTorch functions into verified Triton kernels, step by step."""
    if context.invoked_subcommand is None:
        _show_guide()


# In the order of `mtmc --help`.
_COMMANDS = (
    optimize, apply, undo, report, why, plan, runs, verify, repair, profile, record, export, doctor, calibrate, evolve,
    lineage, knowledge, bench, explore, programs, consent, lsp,
)  # fmt: skip
for _command in _COMMANDS:
    app.command()(_command)
app.add_typer(train, name="train")
