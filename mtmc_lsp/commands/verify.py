"""``mtmc verify REFERENCE CANDIDATE``: whether any candidate computes what a reference computes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from mtmc_lsp.commands.options import AsJson, Fresh, MaxAutotune, Python, RequireSandbox, Verbose, read_project_settings

REDUCED_EXIT_CODE = 4
"""The candidate is correct, but the workload's sizes did not run."""


def verify(
    reference: Annotated[str, typer.Argument(metavar="REFERENCE", help="FILE::NAME, or a file with `Model`.")],
    candidate: Annotated[str, typer.Argument(metavar="CANDIDATE", help="FILE::NAME, or a file with `ModelNew`.")],
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--out", help="Where to write the smallest failing case; else below .mtmc/failures."),
    ] = None,
    seed: Annotated[Optional[int], typer.Option("--seed", help="Of the inputs; else a secret one.")] = None,  # noqa: UP045
    allow_no_kernel: Annotated[
        bool, typer.Option("--allow-no-kernel", help="Accept a candidate that launches no Triton kernel.")
    ] = False,
    never_empty: Annotated[
        bool,
        typer.Option("--never-empty", help="Inputs have at least one element: the candidate need not take empty ones."),
    ] = False,
    far: Annotated[
        bool,
        typer.Option("--far", help="On a GPU, also try sizes at which offsets of elements pass 2^31, if they fit."),
    ] = False,
    sanitize: Annotated[
        bool, typer.Option("--sanitize", help="On a GPU, run it under NVIDIA's compute-sanitizer as well.")
    ] = False,
    require_sandbox: RequireSandbox = False,
    max_autotune: MaxAutotune = None,
    fresh: Fresh = False,
    python: Python = "",
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> int:
    """Check any candidate against any reference, check by check; a failure is written as a file that runs."""
    from mtmc_lsp.app.pipeline import Pipeline, RunOptions
    from mtmc_lsp.app.verify_pair import PairOptions, open_pair
    from mtmc_lsp.core.results import VerdictStatus
    from mtmc_lsp.report.console import LiveLine, console, live
    from mtmc_lsp.report.documents import document
    from mtmc_lsp.report.text import show_pair
    from mtmc_lsp.search.components import Events

    folder = Path(reference.partition("::")[0]).absolute().parent
    settings = read_project_settings(folder, max_autotune=max_autotune)
    reference_target, candidate_target = open_pair(reference, candidate, settings, python)
    pair_options = PairOptions(
        reproduction=out,
        seed=seed,
        needs_kernel=not allow_no_kernel,
        takes_empty=not never_empty,
        far=far,
        sanitize=sanitize,
    )
    options = RunOptions(fresh=fresh, needs_sandbox=require_sandbox)
    line = LiveLine()
    with (
        live(console(stderr=True), line),
        Pipeline(reference_target, options, Events(on_stage=line.enter)) as pipeline,
    ):
        result = pipeline.verify_candidate(candidate_target, pair_options)
    if as_json:
        targets = {"reference": reference_target.definition, "candidate": candidate_target.definition}
        times = {"speed": result.speed, "timing": result.timing, "untimed": result.untimed or None}
        print(document(**targets, verdict=result.verdict, **times, reproduction=result.reproduction or None))
    else:
        show_pair(console(), result, verbose=verbose)
    if not result.verdict.is_correct:
        return 1
    return REDUCED_EXIT_CODE if result.verdict.status is VerdictStatus.CORRECT_AT_REDUCED_SIZES else 0
