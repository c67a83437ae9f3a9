"""``mtmc profile FILE::NAME``: where the time of a call goes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from mtmc_lsp.commands.options import AsJson, Python, open_spec, write_output


def profile(
    spec: Annotated[str, typer.Argument(metavar="FILE::NAME", help="The function, method or module.")],
    html: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--html", metavar="FILE", help="Write one page there, with a roofline plot."),
    ] = None,
    ncu: Annotated[bool, typer.Option("--ncu", help="Count each kernel's bytes by Nsight Compute too.")] = False,
    python: Python = "",
    as_json: AsJson = False,
) -> int:
    """Show where the time of a call goes: operators, kernels, bytes, the part of the roofline, gaps between launches."""
    from mtmc_lsp.app.pipeline import Pipeline
    from mtmc_lsp.app.profile import find_ncu
    from mtmc_lsp.report.console import LiveLine, console, live
    from mtmc_lsp.report.documents import document
    from mtmc_lsp.report.page import render
    from mtmc_lsp.report.profile import profile_page, show_profile
    from mtmc_lsp.search.components import Events

    counter = find_ncu() if ncu else ""
    target = open_spec(spec, python)
    line = LiveLine()
    with (
        live(console(stderr=True), line),
        Pipeline(target, events=Events(on_stage=line.enter)) as pipeline,
    ):
        capture = pipeline.capture()
        result, device = pipeline.profile(counter)
    if html is not None:
        write_output(html, render(profile_page(target.qualname, capture, result, device)))
    if as_json:
        print(
            document(
                target=target.definition,
                environment=capture.environment,
                device=device,
                profile=result,
                roofline=result.roofline,
            )
        )
    else:
        show_profile(console(), target.qualname, capture, result, device)
    return 0
