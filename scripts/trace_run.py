"""Print the processes and phases of a run: `python scripts/trace_run.py FILE::NAME [--budget S]`.

The run is that of `mtmc bench`: nothing is written into the file, and its store is a temporary folder. Times are seconds from the
beginning; `cpu` is processor time. The last lines say how many processes started, how many commands each kind of request took,
when the first step was verified, and when the run ended. `--trace FILE` prints the file of another run instead, which was made by
`MTMC_TRACE=FILE mtmc ...`. With `--path`, it prints for each run of that file which commands its first verdict waited for, one
after the other, and how long nothing ran between two of them: our own process planned or wrote code then, or waited for the GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from mtmc_lsp.app.bench.problem import ProblemRequest, solve
from mtmc_lsp.app.interpreter import checked_python
from mtmc_lsp.core.settings import override_settings, read_settings
from mtmc_lsp.process.trace import ASKED, ENDED, STARTED, TRACE

ROLES = {
    "capture.capture": "capture",
    "verify.reference": "reference",
    "verify.candidate": "candidate",
    "verify.use_candidate": "candidate",
    "verify.guard": "candidate",
    "timing.baselines": "baselines",
    "timing.prepare": "trials",
    "timing.time": "trials",
    "timing.calibration": "trials",
    "compile.launches": "compiler",
    "compile.variants": "compiler",
}
"""The role of a process, by the first of these commands that it answered."""
SHORTEST = 0.02
"""Seconds of the shortest command on a critical path."""


def processes(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The processes in the order in which they started; a number may be used again after the end of its process."""
    found: list[dict[str, Any]] = []
    present: dict[int, dict[str, Any]] = {}
    for event in sorted(events, key=lambda event: event["at"]):
        pid = event["pid"]
        if event["event"] == STARTED:
            present[pid] = {"pid": pid, "how": event["how"], "start": event["at"], "end": None, "cpu": 0.0, "asked": []}
            found.append(present[pid])
        elif pid in present and event["event"] == ASKED:
            present[pid]["asked"].append((event["command"], event["at"] - event["seconds"], event["seconds"]))
        elif pid in present and event["event"] == ENDED:
            one = present[pid]
            one["end"], one["cpu"] = one["end"] or event["at"], max(one["cpu"], event["cpu"])
    return found


def role(process: dict[str, Any]) -> str:
    """What a process does in the run."""
    known = [ROLES[command] for command, _, _ in process["asked"] if command in ROLES]
    return known[0] if known else process["how"] if process["how"] == "fork server" else "unused"


def show(events: list[dict[str, Any]], zero: float) -> dict[str, Any]:
    """Print a table of processes; returns the totals."""
    rows = processes(events)
    print(f"{'role':<12} {'pid':>7} {'how':<11} {'start':>6} {'end':>6} {'cpu':>6}  commands")
    for row in rows:
        asked: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
        for command, _, seconds in row["asked"]:
            asked[command][0] += 1
            asked[command][1] += seconds
        text = ", ".join(f"{name} {count:.0f}x {seconds:.2f}" for name, (count, seconds) in asked.items())
        end = f"{row['end'] - zero:6.2f}" if row["end"] is not None else f"{'-':>6}"
        print(
            f"{role(row):<12} {row['pid']:>7} {row['how']:<11} {row['start'] - zero:6.2f} {end} {row['cpu']:6.2f}  {text}"
        )
    roles = Counter(role(row) for row in rows)
    return {
        "processes": len(rows),
        "roles": dict(roles),
        "commands": dict(Counter(command for row in rows for command, _, _ in row["asked"])),
        "worker_cpu": round(sum(row["cpu"] for row in rows), 2),
    }


def critical_path(events: list[dict[str, Any]]) -> list[tuple[float, float, str, int]]:
    """The commands that the end of the first verification waited for: start, end, command and process.

    Each is the one that ended last before the next one began.
    """
    asked = [
        (event["at"] - event["seconds"], event["at"], event["command"], event["pid"])
        for event in events
        if event["event"] == ASKED and event["seconds"] >= SHORTEST
    ]
    candidates = [one for one in sorted(asked) if one[2] == "verify.candidate"]
    if not candidates:
        return []
    chosen = max(one for one in candidates if one[3] == candidates[0][3])
    path = [chosen]
    while earlier := [one for one in asked if one[1] <= path[-1][0] + SHORTEST and one[0] < path[-1][0]]:
        path.append(max(earlier, key=lambda one: one[1]))
    return path[::-1]


def show_paths(events: list[dict[str, Any]]) -> None:
    """Print the critical path of each run of a trace, by the process that asked for it."""
    owners = list(dict.fromkeys(event["by"] for event in events))
    for owner in owners:
        of_run = [event for event in events if event["by"] == owner]
        zero = min(event["at"] - event.get("seconds", 0.0) for event in of_run)
        path = critical_path(of_run)
        if not path:
            continue
        print(f"run of process {owner}")
        print(f"{'start':>6} {'end':>6} {'waited':>6}  command")
        end = zero
        for start, stop, command, pid in path:
            print(f"{start - zero:6.2f} {stop - zero:6.2f} {max(0.0, start - end):6.2f}  {command} ({pid})")
            end = stop


def traced(target: str, budget: float, file: Path) -> tuple[dict[str, Any], float]:
    """Run a target; returns the answer of the bench's process and the time of the clock at its beginning."""
    path, _, name = target.partition("::")
    settings = override_settings(read_settings(Path(path).parent), budget_seconds=budget)
    os.environ[TRACE] = str(file)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as store:
        request = ProblemRequest(
            str(Path(path).resolve()), name, checked_python(sys.executable), settings, budget + 60, store
        )
        answer = solve(replace(request, fresh=True))
    return answer, began


def main() -> None:
    """Run a target, or read a trace, and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", metavar="FILE::NAME")
    parser.add_argument("--budget", type=float, default=60.0)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--path", action="store_true")
    options = parser.parse_args()
    if options.trace is not None:
        events = [json.loads(line) for line in options.trace.read_text().splitlines()]
        if options.path:
            show_paths(events)
            return
        totals = show(events, min(event["at"] for event in events))
        print(json.dumps(totals))
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.jsonl"
        answer, began = traced(options.target, options.budget, file)
        seconds = time.monotonic() - began
        totals = show([json.loads(line) for line in file.read_text().splitlines()], began)
    first = next((at for at, _, status in answer["progress"] if status == "accepted"), None)
    own = resource.getrusage(resource.RUSAGE_SELF)
    totals |= {
        "status": answer["status"],
        "steps": len(answer["progress"]),
        "first_verified": first,
        "seconds": round(seconds, 2),
        "own_cpu": round(own.ru_utime + own.ru_stime, 2),
        "stages": answer["stages"],
    }
    print(json.dumps(totals))


if __name__ == "__main__":
    main()
