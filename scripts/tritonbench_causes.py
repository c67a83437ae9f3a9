"""Why files of a TritonBench-G run have no faster version: ``python scripts/tritonbench_causes.py RESULTS [--files]``.

Prints three tables: files by the stage at which each ended, refused edits by kind and stage, and where the time went.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

from mtmc_lsp.app.bench.tritonbench_summary import cause_of, summarise_kernels


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--files", action="store_true", help="name the files")
    options = parser.parse_args()
    records = [json.loads(line) for line in options.results.read_text(encoding="utf-8").splitlines()]
    files: dict[str, list[str]] = defaultdict(list)
    for record in records:
        files[cause_of(record)].append(record["problem"])
    print("| cause | files |\n|---|---|")
    for name, problems in sorted(files.items(), key=lambda item: (-len(item[1]), item[0])):
        print(f"| {name} | {len(problems)}{': ' + ', '.join(problems) if options.files else ''} |")
    summary = summarise_kernels(records)
    if summary.refused:
        print("\n| refused edit | stages |\n|---|---|")
    for kind, stages in sorted(summary.refused.items()):
        print(f"| {kind} | {', '.join(f'{stage} {count}' for stage, count in sorted(stages.items()))} |")
    if summary.seconds:
        print("\n| spent on | seconds |\n|---|---|")
    for name, total in sorted(summary.seconds.items(), key=lambda item: -item[1]):
        print(f"| {name} | {total:.0f} |")


if __name__ == "__main__":
    main()
