"""Inlay hints: the measured time at the end of the ``def`` line; off by default."""

from __future__ import annotations

from lsprotocol import types as lsp

from mtmc_lsp.report.phrases import speedup_text
from mtmc_lsp.server.server import Server


def register(server: Server) -> None:
    """Register inlay hints."""
    server.feature(lsp.TEXT_DOCUMENT_INLAY_HINT)(inlay_hints)


def inlay_hints(ls: Server, params: lsp.InlayHintParams) -> list[lsp.InlayHint]:
    """A hint for each target in the range with kept, timed steps, if its code is unchanged since the measurement."""
    document = ls.document(params.text_document.uri)
    if document is None or not ls.settings.inlay_hints:
        return []
    hints = []
    for review_state in ls.review_states(document):
        line = review_state.outlined.target.start_line - 1
        step = review_state.kept_steps[-1] if review_state.kept_steps else None
        timing = step.timing if step is not None else None
        if timing is None or review_state.is_stale or not params.range.start.line <= line <= params.range.end.line:
            continue
        end = document.text.line_range(line).end
        ratio = timing.against("eager")
        label = f"{timing.median_us:.1f} us" + (f" ({ratio.ratio:.2f}x)" if ratio is not None else "")
        tooltip = f"measured; {speedup_text(timing)}, {timing.roofline:.0%} of the roofline"
        hints.append(lsp.InlayHint(end, label, padding_left=True, tooltip=tooltip))
    return hints
