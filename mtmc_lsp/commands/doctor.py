"""``mtmc doctor``: whether the environment has what the tool needs."""

from __future__ import annotations

from mtmc_lsp.commands.options import AsJson, Python
from mtmc_lsp.core.errors import EnvironmentNotAble

NAME_WIDTH = 23
"""Columns for the longest name of a check."""


def doctor(python: Python = "", as_json: AsJson = False) -> int:
    """Check what the tool needs, and say what to do about what is missing."""
    from mtmc_lsp.app.doctor import check_environment
    from mtmc_lsp.report.console import LiveLine, console, live
    from mtmc_lsp.report.documents import document
    from mtmc_lsp.report.text import show_finding

    out, findings = console(stderr=as_json), []
    with live(out, LiveLine(stage="checking the environment")):
        for finding in check_environment(python):
            findings.append(finding)
            if not as_json:
                show_finding(out, finding, NAME_WIDTH)
    if as_json:
        print(document(findings=findings))
    is_able = all(finding.ok or not finding.required for finding in findings)
    return 0 if is_able else EnvironmentNotAble.exit_code
