"""``python -m benchmarks.kernel_faults.run --out FILE [--jobs N] [--every N] [--table T]``: `mtmc repair` on planted faults.

A fault counts as detected if a case or a static check shows it, and as repaired if the repaired file is verified against the
reference with at most five changed lines.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.kernel_faults.faults import FAULTS, TABLES
from benchmarks.kernel_faults.kernels import KERNELS, source
from mtmc_lsp.app.kernels.opening import open_kernel
from mtmc_lsp.app.kernels.repair import repair_kernel
from mtmc_lsp.app.kernels.session import KernelSession
from mtmc_lsp.app.provenance import current_build
from mtmc_lsp.app.target_file import open_target, parse_request
from mtmc_lsp.core.errors import MtmcError
from mtmc_lsp.kernels.search import changed_lines

LAUNCHERS = {"attention": "attend", "bin_counts": "histogram"}
"""Launchers with another name than their kernel's."""


def outcome(name: str, kernel: str, text: str) -> dict[str, Any]:
    """What `mtmc repair` makes of one file."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernels.py"
        path.write_text(text)
        opened = open_target(parse_request(f"{path}::{LAUNCHERS.get(kernel, kernel)}", python=sys.executable))
        try:
            with KernelSession(open_kernel(opened)) as session:
                report = repair_kernel(session)
        except MtmcError as error:
            return {"name": name, "kernel": kernel, "error": str(error), "detected": False, "repaired": False}
    failing, verdict = report.failing, report.result.verdict
    is_verified = verdict is not None and verdict.is_correct and report.result.is_sound
    has_finding = bool(report.findings)
    wrong = report.verdict is not None and not report.verdict.is_correct
    return {
        "name": name,
        "kernel": kernel,
        "detected": failing is not None or has_finding or wrong,
        "by": "case" if failing is not None else "static check" if has_finding else "verification" if wrong else "",
        "faults": sorted({fault.kind.value for fault in failing.faults}) if failing is not None else [],
        "lines": sorted({fault.line for fault in failing.faults} - {0}) if failing is not None else [],
        "repaired": bool(is_verified and report.result.repairs),
        "repairs": [item.title for item in report.result.repairs],
        "changed_lines": changed_lines(text.encode(), report.result.text),
        "tried": report.result.tried,
        "status": verdict.status.value if verdict is not None else "",
        "reason": verdict.reason if verdict is not None else "",
        "seconds": round(time.monotonic() - began, 1),
        "diff": report.diff,
    }


def main() -> None:
    """Run the suite and write its results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="part of a fault's or kernel's name")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--table", choices=TABLES, help="one group of faults, without the sound kernels")
    parser.add_argument("--jobs", type=int, default=1, help="files at a time")
    options = parser.parse_args()
    only, commit = options.only, current_build().commit
    files = [("sound", kernel, source(kernel)) for kernel in KERNELS if only in kernel and not options.table]
    files += [
        (fault.name, fault.kernel, fault.text)
        for fault in (TABLES[options.table] if options.table else FAULTS)[:: options.every]
        if only in fault.name or only in ("", fault.kernel)
    ]
    results: list[dict[str, Any]] = []
    with ThreadPoolExecutor(options.jobs) as pool, options.out.open("w", encoding="utf-8") as stream:
        for result in pool.map(lambda file: outcome(*file), files):
            results.append(result)
            stored = {key: value for key, value in result.items() if key != "diff"}
            stream.write(json.dumps({**stored, "commit": commit, "gpu": False}) + "\n")
            stream.flush()
            print(json.dumps(stored), flush=True)
    planted = [item for item in results if item["name"] != "sound"]
    detected, repaired = (sum(item[key] for item in planted) for key in ("detected", "repaired"))
    reported = [item["kernel"] for item in results if item["name"] == "sound" and item["detected"]]
    print(f"{detected} of {len(planted)} detected, {repaired} repaired; sound kernels with a report: {reported}")


if __name__ == "__main__":
    main()
