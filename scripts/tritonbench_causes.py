"""Why files of a TritonBench-G run have no faster version: ``python scripts/tritonbench_causes.py RESULTS [--files]``.

Each file counts once, under the first stage at which it ended.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NOT_RUN = (
    (r"[Bb]lock pointers have been removed", "block pointers, which this version of Triton removed"),
    (r"takes too long under the interpreter", "too long under the interpreter"),
    (r"the time limit was reached", "the time ended before the original had run"),
    (r"no test calls|launches no kernel", "no test launches its kernels"),
    (r"cannot be loaded", "the file cannot be loaded"),
    (r"compiled without CUDA|NoneType|exchangeDevice", "a function of torch.cuda without a stand-in"),
)
"""Reasons of originals that do not run, and their causes."""
OTHER = "the original raises another error"


def cause(record: Mapping[str, Any]) -> str:
    """The stage at which a file ended, and why."""
    if not record["runs"]:
        reason = record["reason"]
        return "not run: " + next((name for pattern, name in NOT_RUN if re.search(pattern, reason)), OTHER)
    if record["applied"]:
        return "an edit was kept" if record["speedup"] else "an edit was verified, and not timed"
    ended = "limit" in record.get("end_reason", "")
    if not record["tried"]:
        return "run: the time ended before an edit" if ended else "run: no edit was tried"
    if record["failed"]:
        disturbed = all("another program computed" in text for text in record["failed"])
        return (
            "tried: another program disturbed the timing" if disturbed else "tried: an edit failed, and none was kept"
        )
    return "tried: the edits verified, and none was faster" if "rejected" in record else "tried: none was kept"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--files", action="store_true", help="name the files")
    options = parser.parse_args()
    files: dict[str, list[str]] = defaultdict(list)
    for line in options.results.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        files[cause(record)].append(record["problem"])
    print("| cause | files |\n|---|---|")
    for name, problems in sorted(files.items(), key=lambda item: (-len(item[1]), item[0])):
        print(f"| {name} | {len(problems)}{': ' + ', '.join(problems) if options.files else ''} |")


if __name__ == "__main__":
    main()
