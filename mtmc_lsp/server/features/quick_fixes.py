"""Quick fixes of the static checks: the safe change where there is one, and a comment that silences the check."""

from __future__ import annotations

from lsprotocol import types as lsp

from mtmc_lsp.server.edits import edits_of
from mtmc_lsp.server.features.diagnostics import of_finding
from mtmc_lsp.server.server import Document, Server
from mtmc_lsp.source.lint.finding import Finding


def quick_fixes(ls: Server, document: Document, range_: lsp.Range) -> list[lsp.CodeAction]:
    """The fixes of what is reported in a range."""
    first, last = document.text.offset(range_.start), document.text.offset(range_.end)
    actions = []
    for start, finding in document.findings:
        if finding.code in ls.settings.ignored_checks:
            continue
        if start + finding.start <= last and first <= start + finding.end:
            actions += _of_finding(ls, document, start, finding)
    return actions


def _of_finding(ls: Server, document: Document, start: int, finding: Finding) -> list[lsp.CodeAction]:
    diagnostics = [of_finding(document, start, finding)]
    actions = []
    if finding.fix is not None:
        where = document.text.range(start + finding.fix.start, start + finding.fix.end)
        edit = edits_of(ls, document, [lsp.TextEdit(where, finding.fix.new)])
        title = finding.fix.title
        actions.append(lsp.CodeAction(title, lsp.CodeActionKind.QuickFix, diagnostics, is_preferred=True, edit=edit))
    line = document.text.position(start + finding.start).line
    words = document.text.line(line)
    indent = words[: len(words) - len(words.lstrip())].decode()
    newline = "\r\n" if b"\r\n" in document.text.data else "\n"
    above = lsp.Range(lsp.Position(line, 0), lsp.Position(line, 0))
    comment = lsp.TextEdit(above, f"{indent}# mtmc: ignore[{finding.code}]{newline}")
    title = f"Ignore {finding.code} here"
    edit = edits_of(ls, document, [comment])
    actions.append(lsp.CodeAction(title, lsp.CodeActionKind.QuickFix, diagnostics, edit=edit))
    return actions
