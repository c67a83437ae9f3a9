"""``mtmc profile FILE::NAME``: where the time of a call goes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from mtmc_lsp.commands.options import AsJson, Python, open_spec, write_output

if TYPE_CHECKING:
    from mtmc_lsp.app.target_file import OpenTarget


def profile(
    spec: Annotated[str, typer.Argument(metavar="FILE::NAME", help="The function, method, module or kernel.")],
    html: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--html", metavar="FILE", help="Write one page there, with a roofline plot."),
    ] = None,
    ncu: Annotated[bool, typer.Option("--ncu", help="Count each kernel's bytes by Nsight Compute too.")] = False,
    python: Python = "",
    as_json: AsJson = False,
) -> int:
    """Show where the time of a call goes: operators, kernels, bytes, the part of the roofline, gaps between launches."""
    from mtmc_lsp.app.kernels.opening import is_kernel_target
    from mtmc_lsp.app.pipeline import Pipeline
    from mtmc_lsp.app.profile import find_ncu
    from mtmc_lsp.report.console import LiveLine, console, live
    from mtmc_lsp.report.documents import document
    from mtmc_lsp.report.page import render
    from mtmc_lsp.report.profile import profile_page, show_profile
    from mtmc_lsp.search.components import Events

    counter = find_ncu() if ncu else ""
    target = open_spec(spec, python)
    if is_kernel_target(target):
        return _profile_kernel(target, as_json=as_json)
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


def _profile_kernel(target: OpenTarget, *, as_json: bool) -> int:
    """Show what a kernel that is already in the file accesses and computes, and what it needs on a GPU."""
    from mtmc_lsp.app.kernels.opening import NoLauncher, open_kernel
    from mtmc_lsp.app.kernels.profile import profile_kernel, read_profile
    from mtmc_lsp.app.kernels.session import KernelSession
    from mtmc_lsp.core.errors import NoWorkload
    from mtmc_lsp.report.console import LiveLine, console, live
    from mtmc_lsp.report.documents import document
    from mtmc_lsp.report.kernels.profile import show_kernel_profile

    line = LiveLine(stage="observing the kernels")
    try:
        opened = open_kernel(target)
    except (NoWorkload, NoLauncher):
        with live(console(stderr=True), line):
            profile = read_profile(target)
    else:
        with live(console(stderr=True), line), KernelSession(opened, line.enter) as session:
            profile = profile_kernel(session)
    if as_json:
        trace = profile.trace
        observed = {"accesses": trace.accesses, "launches": trace.launches} if trace is not None else {}
        kernels = {"kernels": profile.readings, **observed}
        print(document(target=target.definition, **kernels, compiled=profile.reports, assumed=profile.assumed))
    else:
        show_kernel_profile(console(), profile)
    return 0
