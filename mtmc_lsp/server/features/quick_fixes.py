"""Quick fixes of the static checks: a safe change if there is one, and a comment that disables the check."""

from __future__ import annotations

from lsprotocol import types as lsp

from mtmc_lsp.server.edits import workspace_edit
from mtmc_lsp.server.failures.feature import failure_fixes
from mtmc_lsp.server.features.diagnostics import diagnostic_of
from mtmc_lsp.server.server import Server
from mtmc_lsp.server.text import Document
from mtmc_lsp.source.lint.finding import Finding


def quick_fixes(ls: Server, document: Document, range_: lsp.Range) -> list[lsp.CodeAction]:
    """The fixes for findings in a range."""
    first, last = document.text.offset(range_.start), document.text.offset(range_.end)
    actions = []
    for start, finding in document.findings:
        if finding.code in ls.settings.ignored_checks:
            continue
        if start + finding.start <= last and first <= start + finding.end:
            actions += _fixes_of(ls, document, start, finding)
    return actions + failure_fixes(ls, document, range_)


def _fixes_of(ls: Server, document: Document, start: int, finding: Finding) -> list[lsp.CodeAction]:
    diagnostics = [diagnostic_of(document, start, finding)]
    actions = []
    if finding.fix is not None:
        fix_range = document.text.range(start + finding.fix.start, start + finding.fix.end)
        edit = workspace_edit(ls, document, [lsp.TextEdit(fix_range, finding.fix.new)])
        title = finding.fix.title
        actions.append(lsp.CodeAction(title, lsp.CodeActionKind.QuickFix, diagnostics, is_preferred=True, edit=edit))
    line = document.text.position(start + finding.start).line
    line_text = document.text.line(line)
    indent = line_text[: len(line_text) - len(line_text.lstrip())].decode()
    newline = "\r\n" if b"\r\n" in document.text.data else "\n"
    line_start = lsp.Range(lsp.Position(line, 0), lsp.Position(line, 0))
    comment = lsp.TextEdit(line_start, f"{indent}# mtmc: ignore[{finding.code}]{newline}")
    title = f"Ignore {finding.code} here"
    edit = workspace_edit(ls, document, [comment])
    actions.append(lsp.CodeAction(title, lsp.CodeActionKind.QuickFix, diagnostics, edit=edit))
    return actions
