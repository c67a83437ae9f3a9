"""Static checks of Triton kernels and the surrounding PyTorch code. They run on every edit, without GPU and torch.

A check receives one top-level statement and facts about the names in the file. ``# mtmc: ignore[code]`` on a line, or alone on
the line above, disables a check there. Each check has a page in ``mtmc_lsp/docs/checks``, whose examples are its tests.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from tree_sitter import Node

from mtmc_lsp.source.lint import blocks, grids, host, memory, patterns, precision, syncs, tuning
from mtmc_lsp.source.lint.finding import Context, Finding
from mtmc_lsp.source.lint.kernel import Kernel, kernels_in
from mtmc_lsp.source.outline import LAUNCH, Outline
from mtmc_lsp.source.syntax import parse

__all__ = ["CODES", "ON_SAVE", "Context", "Finding", "check", "context_of", "without_ignored"]

KERNEL_CHECKS: dict[str, Callable[[Kernel], Iterator[Finding]]] = {
    "unmasked-access": memory.unmasked_access,
    "int32-offset": memory.int32_offset,
    "arange-bound": blocks.arange_bound,
    "missing-constexpr": blocks.missing_constexpr,
    "tensor-condition": blocks.tensor_condition,
    "dot-operands": precision.dot_operands,
    "low-precision-accumulator": precision.low_precision_accumulator,
    "autotune-key": tuning.autotune_key,
    "uncoalesced-access": patterns.uncoalesced_access,
    "missed-vectorization": patterns.missed_vectorization,
}
HOST_CHECKS: dict[str, Callable[[Node, Context], Iterator[Finding]]] = {
    "grid-size": grids.grid_size,
    "host-sync": syncs.host_sync,
    "assumed-contiguous": host.assumed_contiguous,
    "python-loop": host.python_loop,
}
CODES = (*KERNEL_CHECKS, *HOST_CHECKS)
"""Checks that run on every edit."""
ON_SAVE = ("shared-memory", "register-spills", "low-occupancy")
"""Checks that need a compiler and run when a file is saved."""
IGNORE = re.compile(rb"#\s*mtmc:\s*ignore(?:\[([^\]]*)\])?")


def context_of(outline: Outline) -> Context:
    """The facts about the file that the checks use."""
    names = outline.names.imports
    return Context(names, outline.kernels, outline.launched, outline.called, outline.mentions_layout, outline.blocks)


def is_checked(text: bytes, context: Context) -> bool:
    """Whether the checks apply to a top-level statement: most neither define nor call a kernel, and need no parsing."""
    return b"jit" in text or b"forward" in text or bool(context.kernels and LAUNCH.search(text))


def check(text: bytes, context: Context) -> tuple[Finding, ...]:
    """Run the checks on one top-level statement. Findings are in source order, with offsets relative to ``text``."""
    if not is_checked(text, context):
        return ()
    root = parse(text)
    findings = [
        f for kernel in kernels_in(root, context) for run_check in KERNEL_CHECKS.values() for f in run_check(kernel)
    ]
    findings += grids.block_size(root, context)
    findings += [finding for run_check in HOST_CHECKS.values() for finding in run_check(root, context)]
    return remove_ignored(text, findings)


def remove_ignored(text: bytes, findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The findings that no comment in ``text`` disables, in source order."""
    ignored = _ignored(text)
    return tuple(sorted((f for f in findings if not _is_ignored(f, text, ignored)), key=lambda f: (f.start, f.code)))


def _ignored(text: bytes) -> dict[int, set[str]]:
    """Map each row to the codes that are disabled there; an empty code disables all checks."""
    rows: dict[int, set[str]] = {}
    for match in IGNORE.finditer(text):
        row = text.count(b"\n", 0, match.start())
        start = text.rfind(b"\n", 0, match.start()) + 1
        codes = {code.strip().decode("utf-8", "replace") for code in (match[1] or b"").split(b",")}
        rows.setdefault(row, set()).update(codes)
        if not text[start : match.start()].strip():
            rows.setdefault(row + 1, set()).update(codes)
    return rows


def _is_ignored(finding: Finding, text: bytes, rows: dict[int, set[str]]) -> bool:
    if not rows:
        return False
    first, last = text.count(b"\n", 0, finding.start), text.count(b"\n", 0, finding.end)
    return any({"", finding.code} & rows.get(row, set()) for row in range(first, last + 1))
