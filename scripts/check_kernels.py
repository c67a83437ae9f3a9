"""Run the static checks on folders of Python files; print the number of kernels and of findings.

    python scripts/check_kernels.py FOLDER... [--code CODE]

Used to measure the false positives of the checks: the table in ``docs/static-checks.md`` is produced with it.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from mtmc_lsp.source.lint import CODES, check, context_of
from mtmc_lsp.source.outline import Outliner
from mtmc_lsp.source.syntax import parse


def main() -> None:
    """Check all files in the folders."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--code", choices=CODES, help="list the findings of this check")
    options = parser.parse_args()
    reports: Counter[str] = Counter()
    files = kernels = 0
    for path in sorted(file for folder in options.folders for file in folder.rglob("*.py")):
        text = path.read_bytes()
        if b"triton" not in text:
            continue
        outline = Outliner(str(path)).outline(text, parse(text))
        files += bool(outline.kernels)
        kernels += len(outline.kernels)
        context = context_of(outline)
        for chunk in outline.chunks:
            for finding in check(chunk.text, context):
                reports[finding.code] += 1
                if finding.code == options.code:
                    line = chunk.line + chunk.text.count(b"\n", 0, finding.start) + 1
                    print(f"{path}:{line}: {finding.message}")
    print(f"{kernels} kernels in {files} files")
    for code in CODES:
        print(f"  {code:28} {reports[code]}")


if __name__ == "__main__":
    main()
