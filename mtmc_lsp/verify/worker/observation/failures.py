"""Describes how a call of a candidate failed. Runs in workers."""

from __future__ import annotations

import re
import traceback

from mtmc_lsp.process import sandbox
from mtmc_lsp.process.worker.failures import classify
from mtmc_lsp.verify.messages import CandidateAnswer, CandidateSource

MAX_ERROR_CHARACTERS = 600
STATEMENTS = ("raise", "assert")


def failure(status: str, error: Exception, candidate: CandidateSource) -> CandidateAnswer:
    """The answer for a candidate that raised an exception."""
    kind = classify(error)
    reason = f"{type(error).__name__}: {str(error)[:MAX_ERROR_CHARACTERS]}"
    if kind.is_out_of_memory:
        reason = f"it ran out of memory, which is limited: {_without_advice(str(error)) or reason}"
    elif isinstance(error, PermissionError) and sandbox.active != sandbox.Isolation():
        reason = f"{reason}; candidates may not write files, open sockets or start processes"
    return CandidateAnswer(status, reason, kind, is_refusal=_is_refusal(error, candidate))


def _without_advice(text: str) -> str:
    """The needed and the free memory that PyTorch's message names; empty if it names none."""
    needed, free = re.search(r"Tried to allocate ([\d.]+ \w+)", text), re.search(r"of which ([\d.]+ \w+) is free", text)
    if needed is None:
        return ""
    return f"{needed[1]} needed" + (f", {free[1]} free" if free else "")


def _is_refusal(error: Exception, candidate: CandidateSource) -> bool:
    """Whether a statement of a separate candidate raises the exception, as for arguments that it does not support."""
    frames = traceback.extract_tb(error.__traceback__)
    if candidate.separate is None or not frames or frames[-1].filename != candidate.separate.target.path:
        return False
    lines, number = candidate.text.splitlines(), frames[-1].lineno or 0
    return 0 < number <= len(lines) and lines[number - 1].strip().startswith(STATEMENTS)
