"""Maintain the suite of targets in installed packages (``benchmarks/public``).

    python scripts/public_suite.py requirements [FOLDER]           # write requirements.txt from the manifests
    python scripts/public_suite.py check [FOLDER] [--half HALF] [--filter TEXT] [--call]

``check`` captures and plans every entry whose package is installed, and prints the refusals grouped by their reason. With
``--call`` it also calls each refused target with a batch of 2, to tell a wrong entry from a limit of this tool. It needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from mtmc_lsp.app.bench.manifest import HALVES, REQUIREMENTS, read_manifests, requirements_text
from mtmc_lsp.app.bench.package_copies import copy_targets, manifest_problems
from mtmc_lsp.app.bench.suite import Problem
from mtmc_lsp.app.interpreter import checked_python
from mtmc_lsp.app.pipeline import Pipeline, RunOptions
from mtmc_lsp.app.target_file import Request, open_target
from mtmc_lsp.core.errors import MtmcError
from mtmc_lsp.core.settings import Settings
from mtmc_lsp.process.fork_server import ForkServer, likely_variables

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "benchmarks" / "public"
CALL_SECONDS = 300.0
SMALL_BATCH = 2
# Runs in the user's interpreter, like the tool's workers.
CALL = """
import sys, torch
from mtmc_lsp.capture.client import find_workload
from mtmc_lsp.capture.worker.calls import build_call
from mtmc_lsp.capture.worker.user_module import load_user_module
from mtmc_lsp.source.targets import find_target
path, name, batch = sys.argv[1:]
text = open(path, "rb").read()
workload = find_workload(path, text, find_target(text, path, name))
sizes = {**workload.sizes, **({"B": int(batch)} if "B" in workload.sizes else {})}
build_call(load_user_module(path), workload, "cpu", sizes).run()
"""


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("requirements", "check"))
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    parser.add_argument("--half", choices=HALVES, help="only this half of the suite")
    parser.add_argument("--filter", default="", help="only entries with this text in their name")
    parser.add_argument("--call", action="store_true", help="call refused targets without this tool")
    parser.add_argument("--out", type=Path, help="append one JSON line per entry")
    arguments = parser.parse_args()
    entries = read_manifests(arguments.folder)
    if arguments.command == "requirements":
        (arguments.folder / REQUIREMENTS).write_text(requirements_text(entries))
        return 0
    python = checked_python(sys.executable)
    chosen = [e for e in entries if arguments.filter in e.name and arguments.half in (None, e.half)]
    with tempfile.TemporaryDirectory() as work:
        copies = copy_targets(chosen, arguments.folder, Path(work), python)
        problems = [p for p in manifest_problems(chosen, Path(work)) if p.name not in copies.skipped]
        groups: defaultdict[str, list[str]] = defaultdict(list)
        with ForkServer(python, likely_variables(), preload=True) as fork_server:
            for problem in problems:
                began = time.monotonic()
                reason, captured = check(problem, python, fork_server)
                if reason and arguments.call:
                    reason = f"{reason} [{call(problem, python)}]"
                groups[reason].append(problem.name)
                seconds = round(time.monotonic() - began, 1)
                print(f"{problem.name}  {seconds} s  {reason or captured}", flush=True)
                if arguments.out:
                    with arguments.out.open("a") as stream:
                        stream.write(json.dumps({"name": problem.name, "seconds": seconds, "reason": reason}) + "\n")
    print(f"\ncaptured {len(groups.pop('', []))} of {len(problems)}; {len(copies.skipped)} skipped")
    if copies.skipped:
        print(f"install their packages: {copies.remedy}")
    for reason, names in sorted(groups.items(), key=lambda item: -len(item[1])):
        print(f"{len(names):4}  {reason}\n      {', '.join(names)}")
    return 1 if groups else 0


def check(problem: Problem, python: str, fork_server: ForkServer) -> tuple[str, str]:
    """Why the problem cannot be captured or planned, empty if it can; and what was captured."""
    try:
        target = open_target(Request(problem.path, problem.target, Settings(), python))
        with Pipeline(target, RunOptions(fork_server=fork_server)) as pipeline:
            capture = pipeline.capture()
            actions, _ = pipeline.plan()
    except MtmcError as error:
        return " ".join(error.message.split()).replace(f"{problem.path.parent}/", ""), ""
    except Exception as error:  # a bug of this tool is one entry's result
        return f"internal error: {type(error).__name__}: {error}", ""
    loops = sum(node.loop is not None for node in capture.graph.nodes)
    notes = "".join(f"; {note}" for note in capture.workload.assumed if "loop" in note)
    captured = f"captured: {len(capture.graph.nodes)} operations, {loops} of them loops over time{notes}"
    return "" if actions else "no action is worth trying", captured


def call(problem: Problem, python: str) -> str:
    """What happens if the target is called as its user would call it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [python, "-W", "ignore", "-c", CALL, str(problem.path), problem.target, str(SMALL_BATCH)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CALL_SECONDS, env=environment)
    except subprocess.TimeoutExpired:
        return "the call takes too long"
    return "the call works" if done.returncode == 0 else f"the call fails: {done.stderr.strip().splitlines()[-1]}"


if __name__ == "__main__":
    sys.exit(main())
