"""Document symbols of targets, and folding ranges of generated code."""

from __future__ import annotations

import re
from bisect import bisect_left

from lsprotocol import types as lsp

from mtmc_lsp.core.workload import TargetKind
from mtmc_lsp.server.server import Server
from mtmc_lsp.server.text import Document
from mtmc_lsp.source.blocks import BEGIN, END
from mtmc_lsp.source.outline import OutlineEntry

KINDS = {
    TargetKind.FUNCTION: lsp.SymbolKind.Function,
    TargetKind.METHOD: lsp.SymbolKind.Method,
    TargetKind.MODULE: lsp.SymbolKind.Class,
    TargetKind.KERNEL: lsp.SymbolKind.Event,
}
BLOCK_START, BLOCK_END = (
    re.compile(rb"^" + mark.encode() + rb" (\S+)[ \t]*\r?$", re.MULTILINE) for mark in (BEGIN, END)
)


def register(server: Server) -> None:
    """Register symbols and folding."""
    server.feature(lsp.TEXT_DOCUMENT_DOCUMENT_SYMBOL)(symbols)
    server.feature(lsp.TEXT_DOCUMENT_FOLDING_RANGE)(folding)


def symbols(ls: Server, params: lsp.DocumentSymbolParams) -> list[lsp.DocumentSymbol]:
    """The targets of a file as symbols; methods are children of their class."""
    document = ls.document(params.text_document.uri)
    if document is None:
        return []
    symbols_by_name: dict[str, lsp.DocumentSymbol] = {}
    top_level = []
    for item in document.outline.targets:
        symbol = _symbol(document, item)
        parent = symbols_by_name.get(item.target.qualname.rpartition(".")[0])
        symbols_by_name[item.target.qualname] = symbol
        if parent is not None:
            parent.children = children = parent.children if isinstance(parent.children, list) else []
            children.append(symbol)
        else:
            top_level.append(symbol)
    return top_level


def _symbol(document: Document, item: OutlineEntry) -> lsp.DocumentSymbol:
    target = item.target
    name_line = document.text.line_range(target.start_line - 1)
    full_range = lsp.Range(lsp.Position(item.first_line - 1, 0), document.text.line_range(target.end_line - 1).end)
    detail = "Triton kernel" if target.kind is TargetKind.KERNEL else target.kind.value
    return lsp.DocumentSymbol(
        target.qualname.rpartition(".")[2], KINDS[target.kind], full_range, name_line, detail=detail
    )


def folding(ls: Server, params: lsp.FoldingRangeParams) -> list[lsp.FoldingRange]:
    """The generated blocks."""
    document = ls.document(params.text_document.uri)
    if document is None:
        return []
    text = document.text
    ends: dict[bytes, list[int]] = {}
    for mark in BLOCK_END.finditer(text.data):
        ends.setdefault(mark[1], []).append(mark.start())
    ranges = []
    for mark in BLOCK_START.finditer(text.data):
        candidates = ends.get(mark[1], [])
        index = bisect_left(candidates, mark.end())
        if index < len(candidates):
            first, last = text.position(mark.start()).line, text.position(candidates[index]).line
            ranges.append(lsp.FoldingRange(first, last, kind=lsp.FoldingRangeKind.Region))
    return ranges
