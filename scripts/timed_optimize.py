"""Run `mtmc optimize` and write how long its verification of versions took: `python scripts/timed_optimize.py OUT ARGUMENTS`.

OUT gets a JSON object: the number of versions, seconds, and seconds of processor time of all processes of the run. The package
may be at an earlier commit.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from mtmc_lsp.cli import main
from mtmc_lsp.verify.engine import VerificationEngine

TICKS = os.sysconf("SC_CLK_TCK")
totals = {"versions": 0, "seconds": 0.0, "processor_seconds": 0.0}
verify = VerificationEngine.verify


def processor_seconds() -> float:
    """Processor time of this process and of all that it started, also of those that ended."""
    fields = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # After the name, which may contain spaces: the parent, and later four times, two of them of ended children.
            rest = path.read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:
            continue
        fields[int(path.parent.name)] = int(rest[1]), sum(map(int, rest[11:15]))
    ours, before = {os.getpid()}, 0
    while len(ours) > before:
        before = len(ours)
        ours |= {process for process, (parent, _) in fields.items() if parent in ours}
    return sum(fields[process][1] for process in ours) / TICKS


def timed(*arguments: Any, **named: Any) -> Any:
    """Verify one version."""
    began, spent = time.monotonic(), processor_seconds()
    try:
        return verify(*arguments, **named)
    finally:
        totals["versions"] += 1
        totals["seconds"] += time.monotonic() - began
        totals["processor_seconds"] += processor_seconds() - spent
        Path(out).write_text(json.dumps(totals), encoding="utf-8")


if __name__ == "__main__":
    out = os.path.abspath(sys.argv.pop(1))
    VerificationEngine.verify = timed  # type: ignore[method-assign]
    main()
