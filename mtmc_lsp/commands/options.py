"""Options and helpers that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from mtmc_lsp.core.errors import Location, RequestError

if TYPE_CHECKING:
    from mtmc_lsp.app.target_file import OpenTarget
    from mtmc_lsp.core.settings import Settings

# typer reads these at run time, on Python 3.10 too.
Spec = Annotated[str, typer.Argument(metavar="FILE::NAME", help="The function, method, module or kernel.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Show reasons, checks, times and registers too.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]
Python = Annotated[str, typer.Option("--python", help="The interpreter that your code runs under.")]
Arch = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--arch", help="Compile for these, comma-separated, where there is no GPU."),
]
Search = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--search", help="How steps are tried: greedy (the default), beam, or mcts (tree search)."),
]
MaxAutotune = Annotated[
    Optional[bool],  # noqa: UP045
    typer.Option("--max-autotune", help="Time torch.compile(mode='max-autotune') too, which takes minutes."),
]
PolicyFile = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--policy-file", metavar="FILE", help="The ranker's file or lm's folder, as `mtmc train policy` wrote it."
    ),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Time again what was timed before.")]
Cluster = Annotated[
    str,
    typer.Option(
        "--cluster", metavar="ADDRESS", help="Use a Dask cluster: local[:N], tcp://HOST:PORT, tls://HOST:PORT."
    ),
]
RequireSandbox = Annotated[
    bool, typer.Option("--require-sandbox", help="Refuse if a candidate cannot run in a sandbox.")
]


def check_choice(option: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuse a value that an option does not have.

    Raises:
        RequestError: ``value`` is not one of ``choices``.
    """
    if value not in choices:
        raise RequestError(f"--{option} {value} does not exist", remedy=f"Choose {' or '.join(choices)}.")


def read_project_settings(
    folder: Path, arch: str | None = None, budget: float | None = None, **changes: object
) -> Settings:
    """The settings of the project of ``folder``, with the changes of the command line; None changes nothing."""
    from mtmc_lsp.core.settings import override_settings, read_settings

    archs = tuple(name.strip() for name in arch.split(",")) if arch is not None else None
    if isinstance(policy_file := changes.get("policy_file"), str):
        # Processes of a bench run in other folders.
        changes["policy_file"] = str(Path(policy_file).expanduser().absolute())
    return override_settings(read_settings(folder), archs=archs, budget_seconds=budget, **changes)


def open_spec(
    spec: str, python: str, arch: str | None = None, budget: float | None = None, **changes: object
) -> OpenTarget:
    """Read ``FILE::NAME`` with the settings of its project and the changes of the command line."""
    from mtmc_lsp.app.target_file import open_target, parse_request

    folder = Path(spec.partition("::")[0]).absolute().parent
    return open_target(parse_request(spec, read_project_settings(folder, arch, budget, **changes), python))


def write_output(path: Path, text: str) -> None:
    """Write a file that the command line names.

    Raises:
        RequestError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8", newline="")
    except OSError as error:
        raise RequestError(
            f"cannot be written: {error.strerror}", where=Location(str(path)), remedy="Choose another file."
        ) from None
