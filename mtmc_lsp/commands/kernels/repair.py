"""``mtmc repair FILE::NAME``: detect faults of a Triton kernel that is already in a file, and repair them."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from mtmc_lsp.commands.options import AsJson, Python, open_spec


def repair(
    spec: Annotated[str, typer.Argument(metavar="FILE::NAME", help="A kernel, or the function that launches it.")],
    apply: Annotated[
        bool, typer.Option("--apply", help="Write the repairs into the file; the text before is kept as a backup.")
    ] = False,
    seconds: Annotated[float, typer.Option("--seconds", min=1, help="Time for trying repairs.")] = 120.0,
    python: Python = "",
    as_json: AsJson = False,
) -> int:
    """Detect faults of a Triton kernel by cases and static checks, and repair them by small verified edits."""
    from mtmc_lsp.app.kernels.opening import open_kernel
    from mtmc_lsp.app.kernels.repair import apply_repair, repair_kernel
    from mtmc_lsp.app.kernels.repair_run import store_repair
    from mtmc_lsp.app.kernels.session import KernelSession
    from mtmc_lsp.report.console import LiveLine, console, live
    from mtmc_lsp.report.documents import document
    from mtmc_lsp.report.kernels.repair import show_repair

    target = open_kernel(open_spec(spec, python))
    line, began = LiveLine(), time.monotonic()
    with live(console(stderr=True), line), KernelSession(target, line.enter) as session:
        report = repair_kernel(session, seconds=seconds)
        # Stored before it is written, so that `mtmc undo` takes it back.
        result = store_repair(session, report, time.monotonic() - began) if apply else None
    backup = apply_repair(report) if apply and report.is_repaired else None
    if as_json:
        print(
            document(
                target=target.opened.definition,
                launcher=target.launcher.qualname,
                reference=target.reference.target.qualname if target.reference is not None else None,
                sound=report.was_sound,
                repaired=report.is_repaired,
                failing=report.failing,
                verdict_before=report.verdict,
                findings=[
                    {"code": item.finding.code, "line": item.line, "message": item.finding.message}
                    for item in report.findings
                ],
                repairs=[{"line": item.line, "title": item.title} for item in report.result.repairs],
                verdict=report.result.verdict,
                diff=report.diff,
                backup=str(backup) if backup is not None else None,
                run=result.id if result is not None else None,
            )
        )
    else:
        show_repair(console(), report, backup, result.id if result is not None else "")
    return 0 if report.was_sound or backup is not None else 1
