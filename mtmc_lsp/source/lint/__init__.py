"""Static checks of Triton kernels and of the PyTorch code around them: on every edit, with no GPU and no torch.

A check looks at one top-level statement and at what the file says of its names. ``# mtmc: ignore[code]`` on a line, or alone on
the line above, silences a check there. Every check has a page in ``mtmc_lsp/docs/checks``, whose examples are its tests.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from tree_sitter import Node

from mtmc_lsp.source.lint import blocks, host, memory, precision, syncs, tuning
from mtmc_lsp.source.lint.finding import Context, Finding
from mtmc_lsp.source.lint.kernel import Kernel, kernels_in
from mtmc_lsp.source.outline import LAUNCH, Outline
from mtmc_lsp.source.syntax import parse

__all__ = ["CODES", "ON_SAVE", "Context", "Finding", "check", "context_of", "without_ignored"]

OF_KERNEL: dict[str, Callable[[Kernel], Iterator[Finding]]] = {
    "unmasked-access": memory.unmasked_access,
    "int32-offset": memory.int32_offset,
    "arange-bound": blocks.arange_bound,
    "missing-constexpr": blocks.missing_constexpr,
    "tensor-condition": blocks.tensor_condition,
    "dot-operands": precision.dot_operands,
    "low-precision-accumulator": precision.low_precision_accumulator,
    "autotune-key": tuning.autotune_key,
}
OF_HOST: dict[str, Callable[[Node, Context], Iterator[Finding]]] = {
    "host-sync": syncs.host_sync,
    "assumed-contiguous": host.assumed_contiguous,
    "python-loop": host.python_loop,
}
CODES = (*OF_KERNEL, *OF_HOST)
"""Checks that are made on every edit."""
ON_SAVE = ("shared-memory",)
"""Checks that need a compiler, and are made when a file is saved."""
IGNORE = re.compile(rb"#\s*mtmc:\s*ignore(?:\[([^\]]*)\])?")


def context_of(outline: Outline) -> Context:
    """What the checks know of the file around a statement."""
    names = outline.names.imports
    return Context(names, outline.kernels, outline.launched, outline.called, outline.minds_layout)


def check(text: bytes, context: Context) -> tuple[Finding, ...]:
    """What the checks find in one top-level statement, in source order; offsets are relative to ``text``."""
    # Most of a file is neither a kernel nor calls one, and need not be parsed.
    if not (b"jit" in text or b"forward" in text or (context.kernels and LAUNCH.search(text))):
        return ()
    root = parse(text)
    found = [f for kernel in kernels_in(root, context) for one in OF_KERNEL.values() for f in one(kernel)]
    found += [finding for one in OF_HOST.values() for finding in one(root, context)]
    return without_ignored(text, found)


def without_ignored(text: bytes, findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The findings that no comment in ``text`` silences, in source order."""
    ignored = _ignored(text)
    return tuple(sorted((f for f in findings if not _is_ignored(f, text, ignored)), key=lambda f: (f.start, f.code)))


def _ignored(text: bytes) -> dict[int, set[str]]:
    """Row to the codes that are ignored there; an empty name stands for all."""
    rows: dict[int, set[str]] = {}
    for found in IGNORE.finditer(text):
        row = text.count(b"\n", 0, found.start())
        start = text.rfind(b"\n", 0, found.start()) + 1
        codes = {code.strip().decode("utf-8", "replace") for code in (found[1] or b"").split(b",")}
        rows.setdefault(row, set()).update(codes)
        if not text[start : found.start()].strip():
            rows.setdefault(row + 1, set()).update(codes)
    return rows


def _is_ignored(finding: Finding, text: bytes, rows: dict[int, set[str]]) -> bool:
    if not rows:
        return False
    first, last = text.count(b"\n", 0, finding.start), text.count(b"\n", 0, finding.end)
    return any({"", finding.code} & rows.get(row, set()) for row in range(first, last + 1))
