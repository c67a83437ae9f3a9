"""``mtmc knowledge``: search the notes on kernels and the lessons of earlier runs, offline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from mtmc_lsp.commands.options import AsJson


def knowledge(
    words: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(metavar="[WORDS]", help="What to search for: softmax, hopper tma, autotune matmul."),
    ] = None,
    arch: Annotated[
        str, typer.Option("--arch", help="Prefer notes on this architecture; by default that of the settings.")
    ] = "",
    limit: Annotated[int, typer.Option("--limit", min=1, help="Most results.")] = 5,
    as_json: AsJson = False,
) -> int:
    """Search the notes on fast kernels, and what earlier runs on this machine kept or rejected and why."""
    from mtmc_lsp.capture.module_paths import project_root
    from mtmc_lsp.commands.options import read_project_settings
    from mtmc_lsp.device.choice import planning_model
    from mtmc_lsp.evolve.knowledge.base import KnowledgeBase, notes
    from mtmc_lsp.evolve.knowledge.past_runs import all_lessons
    from mtmc_lsp.report.console import console, show
    from mtmc_lsp.report.documents import document

    project = project_root(Path.cwd() / "any.py")
    lessons = all_lessons(project)
    wanted = arch or planning_model(read_project_settings(project).archs).arch
    base = KnowledgeBase([*notes(), *lessons], arch=wanted)
    hits = base.search(" ".join(words or ()), limit)
    if as_json:
        print(document(notes=len(notes()), lessons=len(lessons), hits=hits))
        return 0 if hits or not words else 1
    out = console()
    if not words:
        show(out, f"{len(notes())} notes and {len(lessons)} lessons of earlier runs; search them: mtmc knowledge WORDS")
        return 0
    for hit in hits:
        show(out, hit.entry.title, style="bold")
        for line in hit.entry.text.splitlines():
            show(out, line, indent=2)
    if not hits:
        show(out, "nothing is known about that; try other words, such as the name of an operation")
    return 0 if hits else 1
