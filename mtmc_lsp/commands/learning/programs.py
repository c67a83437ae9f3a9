"""``mtmc programs OUT``: PyTorch programs for `mtmc explore` to learn from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mtmc_lsp.commands.options import AsJson


def programs(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder; each family gets a folder in it.")],
    count: Annotated[int, typer.Option("--count", min=1, help="How many programs.")] = 600,
    seed: Annotated[int, typer.Option("--seed", help="The same seed and count give the same files.")] = 0,
    family: Annotated[str, typer.Option("--family", metavar="F", help="Only this family: softmax, rotary, ...")] = "",
    as_json: AsJson = False,
) -> int:
    """Write PyTorch programs as people write them, for policies to learn from."""
    from mtmc_lsp.programs.corpus import write_programs
    from mtmc_lsp.programs.generator import generate
    from mtmc_lsp.report.console import console, show
    from mtmc_lsp.report.documents import document

    written = generate(count, seed, family)
    write_programs(written, out)
    families = len({program.family for program in written})
    if as_json:
        listed = [{"family": item.family, "file": item.file, "target": item.target} for item in written]
        print(document(folder=str(out), programs=listed))
        return 0
    show(console(), f"{len(written)} programs of {families} {'family' if families == 1 else 'families'} in {out}")
    return 0
