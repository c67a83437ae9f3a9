"""What was observed of a text, for a version of it that only launches its kernels directly."""

from __future__ import annotations

from dataclasses import replace

from mtmc_lsp.kernels.actions.launch.helper import HELPER, NAME
from mtmc_lsp.kernels.messages import CaseTrace

INSERTED = f"{HELPER}\n\n".encode()


def moved_trace(trace: CaseTrace, before: bytes, after: bytes) -> CaseTrace | None:
    """A trace of a text with the line numbers of a version; None if more than the helper and its decorators was added."""
    lines, at = after.split(b"\n"), after.find(INSERTED)
    first = after.count(b"\n", 0, at) if at >= 0 else len(lines)
    helper = range(first, first + INSERTED.count(b"\n"))
    kept = [i for i, line in enumerate(lines) if i not in helper and line.strip() != f"@{NAME}".encode()]
    if [lines[i] for i in kept] != before.split(b"\n"):
        return None
    accesses = tuple(replace(access, line=kept[access.line - 1] + 1) for access in trace.accesses)
    return replace(trace, accesses=accesses)
