"""``mtmc doctor``: whether the environment has what the tool needs."""

from __future__ import annotations

from mtmc_lsp.commands.options import AsJson, Python
from mtmc_lsp.core.errors import EnvironmentNotAble


def doctor(python: Python = "", as_json: AsJson = False) -> int:
    """Check what the tool needs, and say what to do about what is missing."""
    from mtmc_lsp.app.doctor import check_environment
    from mtmc_lsp.report.documents import document
    from mtmc_lsp.report.text import console, findings_table

    with console(stderr=True).status("checking the environment"):
        findings = check_environment(python)
    if as_json:
        print(document(findings=findings))
    else:
        console().print(findings_table(findings))
    is_able = all(finding.ok or not finding.required for finding in findings)
    return 0 if is_able else EnvironmentNotAble.exit_code
