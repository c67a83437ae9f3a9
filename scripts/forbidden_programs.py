"""Write ``mtmc_lsp/programs/forbidden.txt``: fingerprints of the programs that policies are evaluated on.

    python scripts/forbidden_programs.py examples everyday unseen loops loops_cudnn loops_training
    python scripts/forbidden_programs.py kernelbench --kernelbench FOLDER     # a clone's folder KernelBench
    python scripts/forbidden_programs.py reporting                 # with the packages of the public suite

Each suite has a section of the file; the named ones are written again. The file contains hashes, no code. It needs no GPU.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from mtmc_lsp.app.bench.manifest import read_manifests
from mtmc_lsp.app.bench.package_copies import copy_targets, manifest_problems
from mtmc_lsp.app.bench.suite import Problem, find_problems
from mtmc_lsp.app.interpreter import checked_python
from mtmc_lsp.programs.capturing import CapturedProblem, capture_problems
from mtmc_lsp.programs.fingerprints import FORBIDDEN_FILE, fingerprint, is_common

ROOT = Path(__file__).resolve().parent.parent
HEADER = "# Fingerprints of programs that policies are evaluated on. Written by scripts/forbidden_programs.py."
FOLDERS = {
    "examples": "examples",
    "everyday": "benchmarks/everyday",
    "unseen": "benchmarks/unseen",
    "loops": "benchmarks/loops",
    "loops_cudnn": "benchmarks/loops_cudnn",
    "loops_training": "benchmarks/loops_training",
}
SECTION = "# suite "
LEVELS = ("level1", "level2", "level3")
"""The levels of KernelBench whose problems need no downloaded weights."""


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="+", choices=(*FOLDERS, "kernelbench", "reporting"))
    parser.add_argument("--kernelbench", type=Path, help="the folder with level1, level2 and level3")
    arguments = parser.parse_args()
    if "kernelbench" in arguments.suites and arguments.kernelbench is None:
        parser.error("kernelbench needs --kernelbench FOLDER")
    python = checked_python(sys.executable)
    with tempfile.TemporaryDirectory() as work:
        for suite in arguments.suites:
            problems = list(problems_of(suite, arguments.kernelbench, Path(work), python))
            lines = section(suite, capture_problems(problems, python))
            # Read now: another run may have written its suite meanwhile.
            write_sections({**read_sections(), suite: lines})
    return 0


def problems_of(suite: str, kernelbench: Path | None, work: Path, python: str) -> Iterator[Problem]:
    """The problems of a suite that can be captured here."""
    if suite in FOLDERS:
        yield from find_problems(ROOT / FOLDERS[suite])
    elif suite == "kernelbench":
        assert kernelbench is not None
        chosen = (problem for problem in find_problems(kernelbench) if problem.level in LEVELS)
        yield from (with_small_batch(problem, work) for problem in chosen)
    else:
        folder = ROOT / "benchmarks" / "public"
        entries = [entry for entry in read_manifests(folder) if entry.half == "reporting"]
        copies = copy_targets(entries, folder, work, python)
        yield from (item for item in manifest_problems(entries, work) if item.name not in copies.skipped)


def with_small_batch(problem: Problem, work: Path) -> Problem:
    """A copy of the problem with a batch of 2: fingerprints do not depend on sizes, and capture may run the target."""
    text = re.sub(r"^batch_size = .*", "batch_size = 2", problem.path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    path = work / problem.level / problem.path.name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return replace(problem, path=path, suite=work)


def section(suite: str, items: Iterable[CapturedProblem]) -> list[str]:
    """The lines of a suite: its numbers, then its fingerprints."""
    hashes: set[str] = set()
    count = captured = 0
    for item in items:
        count += 1
        captured += bool(item.captures)
        hashes |= {fingerprint(capture.graph) for capture in item.captures if not is_common(capture.graph)}
        print(f"{suite} {item.problem.name}: {item.error or len(item.captures[0].graph.nodes)}", flush=True)
    return [
        f"{SECTION}{suite}: {count} programs, {captured} captured, {len(hashes)} graphs of more than 3 operations",
        *sorted(hashes),
    ]


def read_sections() -> dict[str, list[str]]:
    """The sections of the file as it is."""
    sections: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in FORBIDDEN_FILE.read_text(encoding="utf-8").splitlines() if FORBIDDEN_FILE.exists() else []:
        if line.startswith(SECTION):
            lines = sections[line.removeprefix(SECTION).partition(":")[0]] = []
        lines.append(line)
    return sections


def write_sections(sections: dict[str, list[str]]) -> None:
    """Write the file, its sections in the order of their names."""
    lines = [HEADER, *(line for suite in sorted(sections) for line in sections[suite])]
    FORBIDDEN_FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
