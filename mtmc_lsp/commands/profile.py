"""``mtmc profile FILE::NAME``: where the time of a call goes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from mtmc_lsp.core.errors import Location, RequestError


def profile(
    spec: Annotated[str, typer.Argument(metavar="FILE::NAME", help="The function, method or module.")],
    html: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--html", metavar="FILE", help="Write one page there, with a roofline plot."),
    ] = None,
    ncu: Annotated[bool, typer.Option("--ncu", help="Count each kernel's bytes by Nsight Compute too.")] = False,
    python: Annotated[str, typer.Option("--python", help="The interpreter that your code runs under.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")] = False,
) -> int:
    """Show where the time of a call goes: operators, kernels, bytes, the part of the roofline, gaps between launches."""
    from mtmc_lsp.app.pipeline import capture_target, open_target, parse_request
    from mtmc_lsp.app.profile import find_ncu
    from mtmc_lsp.app.profile import profile as profiled
    from mtmc_lsp.report.documents import document
    from mtmc_lsp.report.page import render
    from mtmc_lsp.report.profile import profile_page, show_profile
    from mtmc_lsp.report.text import console

    counter = find_ncu() if ncu else ""
    opened = open_target(parse_request(spec, None, python))
    with console(stderr=True).status("capturing the target") as status:
        capture = capture_target(opened)
        status.update("profiling")
        found, device = profiled(opened, capture, ncu=counter)
    if html is not None:
        page = render(profile_page(opened.target.qualname, capture, found, device))
        try:
            html.write_text(page, encoding="utf-8")
        except OSError as error:
            where = Location(str(html))
            raise RequestError(
                f"cannot be written: {error.strerror}", where=where, remedy="Choose another file."
            ) from None
    if as_json:
        print(
            document(
                target=opened.target,
                environment=capture.environment,
                device=device,
                profile=found,
                roofline=found.roofline,
            )
        )
    else:
        show_profile(console(), opened.target.qualname, capture, found, device)
    return 0
