"""Compare how long verification takes at two commits, for the ten examples and without a GPU.

Usage: python scripts/time_verification.py BEFORE AFTER FOLDER [--of optimize|verify] [--repeats N] [--out FILE] [--only NAME]

BEFORE and AFTER are Python interpreters in which the package is installed at a commit each. They take turns, so that other work
on the machine slows both. Processor time includes all processes that the command starts.

With `--of optimize`, each optimises the examples, and the verification of its versions is timed. With `--of verify`, both run
`mtmc verify` on the file that `mtmc optimize --apply` of AFTER writes for an example, below FOLDER.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure_examples import EXAMPLES, ROOT

SUBREAPER = 36
"""``PR_SET_CHILD_SUBREAPER`` of ``prctl``: processes whose parent ends become children of this one."""
BUDGET = "300"
"""Seconds in which `mtmc optimize` must end."""
TIMED = ROOT / "scripts" / "timed_optimize.py"
TIMES = ("processor_seconds", "seconds")


def commit(python: str) -> str:
    """The commit of the package that an interpreter imports."""
    text = "import mtmc_lsp; print(mtmc_lsp.__path__[0])"
    folder = subprocess.run([python, "-c", text], cwd="/", capture_output=True, text=True, check=True).stdout.strip()
    command = ["git", "-C", folder, "log", "-1", "--format=%h"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def run(command: list[str], folder: Path) -> str:
    """The output of a command that sees no GPU; its processes have ended."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return done.stdout


def optimized(python: str, name: str) -> dict[str, Any]:
    """Optimise an example in a new folder: versions, and the times of their verification, for each version."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(ROOT / "examples" / f"{name}.py", folder)
        command = [python, str(TIMED), "times.json", "optimize", f"{name}.py::{EXAMPLES[name]}", "--budget", BUDGET]
        run(command, Path(folder))
        times = json.loads(Path(folder, "times.json").read_text(encoding="utf-8"))
    versions = times["versions"]
    return {"versions": versions, **{key: round(times[key] / versions, 2) for key in TIMES}}


def verified(python: str, folder: Path, name: str) -> dict[str, Any]:
    """Verify the candidate of an example: status, and the times of the command."""
    pair = [f"{file}.py::{EXAMPLES[name]}" for file in ("reference", "candidate")]
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    output = run([python, "-m", "mtmc_lsp", "verify", "--json", *pair], folder)
    seconds, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    status = json.loads(output)["verdict"]["status"]
    return {"status": status, "processor_seconds": round(spent, 2), "seconds": round(seconds, 2)}


def write_candidate(python: str, folder: Path, name: str) -> None:
    """Optimise a copy of an example, unless that was done before."""
    if (folder / "candidate.py").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    for copy in ("reference.py", "work.py"):
        shutil.copy(ROOT / "examples" / f"{name}.py", folder / copy)
    run([python, "-m", "mtmc_lsp", "optimize", f"work.py::{EXAMPLES[name]}", "--apply", "--budget", BUDGET], folder)
    (folder / "work.py").rename(folder / "candidate.py")


def table(lines: list[dict[str, Any]], commits: tuple[str, str]) -> str:
    """The medians of each example, and of the ratios."""
    rows = [f"| example | {commits[0]}: CPU s, s | {commits[1]}: CPU s, s | ratio of CPU s, of s |", "|---" * 4 + "|"]
    ratios: dict[str, list[float]] = {key: [] for key in TIMES}
    for name in dict.fromkeys(line["example"] for line in lines):
        some = {each: [line for line in lines if (line["example"], line["commit"]) == (name, each)] for each in commits}
        medians = {key: [statistics.median(line[key] for line in some[each]) for each in commits] for key in TIMES}
        for key, (before, after) in medians.items():
            ratios[key].append(after / before)
        times = " | ".join(", ".join(f"{medians[key][i]:.1f}" for key in TIMES) for i in range(2))
        rows.append(f"| {name} | {times} | {', '.join(f'{ratios[key][-1]:.2f}' for key in TIMES)} |")
    middle = ", ".join(f"{statistics.median(ratios[key]):.2f}" for key in TIMES)
    return "\n".join([*rows, f"| median | | | {middle} |"])


def main() -> None:
    """Measure both commits in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--of", choices=("optimize", "verify"), default="optimize")
    parser.add_argument("--only", action="append", choices=EXAMPLES, help="this example (may be repeated)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="one JSON line for each measurement")
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    pythons = {commit(python): python for python in map(os.path.abspath, (options.before, options.after))}
    commits = tuple(pythons)
    names, lines = options.only or list(EXAMPLES), list[dict[str, Any]]()
    for name in names if options.of == "verify" else ():
        write_candidate(pythons[commits[-1]], options.folder / name, name)
    for turn in range(options.repeats):
        for name in names:
            for label, python in pythons.items():
                folder = options.folder / name
                measured = optimized(python, name) if options.of == "optimize" else verified(python, folder, name)
                lines.append({"of": options.of, "example": name, "commit": label, "turn": turn, **measured})
                print(json.dumps(lines[-1]), file=sys.stderr, flush=True)
                if options.out:
                    options.out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    print(table(lines, (commits[0], commits[-1])))


if __name__ == "__main__":
    main()
