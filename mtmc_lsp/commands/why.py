"""``mtmc why FILE::NAME``: whether the kernels in a file run, and which condition refuses them."""

from __future__ import annotations

from mtmc_lsp.commands.options import AsJson, Python, Spec, open_spec


def why(spec: Spec, python: Python = "", as_json: AsJson = False) -> int:
    """Say whether the kernels run for the file's workload and for recorded calls, and if not, which condition refuses."""
    from mtmc_lsp.app.why import explain_guard
    from mtmc_lsp.report.console import LiveLine, console, live
    from mtmc_lsp.report.documents import document
    from mtmc_lsp.report.text import show_guard

    target = open_spec(spec, python)
    with live(console(stderr=True), LiveLine(stage="calling the target")):
        report = explain_guard(target)
    if as_json:
        print(
            document(target=target.definition, kernels_run=report.kernels_run, calls=report.calls, notes=report.notes)
        )
    else:
        show_guard(console(), target.qualname, report)
    return 0 if report.kernels_run else 1
