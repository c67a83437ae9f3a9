"""``mtmc plan FILE::NAME``: the possible first steps, without writing anything."""

from __future__ import annotations

from mtmc_lsp.commands.options import Arch, AsJson, Python, Spec, open_spec


def plan(spec: Spec, arch: Arch = None, python: Python = "", as_json: AsJson = False) -> int:
    """Show what could be tried first, best first, with reasons; nothing is written."""
    from mtmc_lsp.app.pipeline import Pipeline
    from mtmc_lsp.report.console import LiveLine, console, live
    from mtmc_lsp.report.documents import document
    from mtmc_lsp.report.text import show_plan

    target = open_spec(spec, python, arch)
    with live(console(stderr=True), LiveLine(stage="capturing the target")), Pipeline(target) as pipeline:
        capture = pipeline.capture()
        actions, device = pipeline.plan()
    if as_json:
        print(document(target=target.definition, device=device, actions=actions))
    else:
        show_plan(console(), actions, device, capture.workload.assumed)
    return 0 if actions else 1
