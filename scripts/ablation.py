"""Measure what each action and rewrite rule contributes: run problems again with one of them switched off.

Usage: mtmc bench DIR --out RESULTS --time-limit 90 --budget 30
       python scripts/ablation.py DIR=RESULTS ... --out FILE [--jobs 5] [--per-action 3] [--time-limit 90] [--budget 30]
       python scripts/ablation.py --summary FILE

The results of ``mtmc bench`` are with all actions. Each action (and each rewrite rule) that was accepted there runs again
switched off, on the problems where its steps gained most. Use the same limits. Start it again to resume. Needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from mtmc_lsp.app.bench.runner import append_result, visible_devices


@dataclass(frozen=True)
class Trial:
    """One problem with one action or rewrite rule switched off."""

    suite: Path
    problem: str
    without: str


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", metavar="DIR=RESULTS", help="a suite and its results with all actions")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--summary", type=Path)
    parser.add_argument("--jobs", type=int, default=5)
    parser.add_argument("--per-action", type=int, default=3)
    parser.add_argument("--time-limit", type=float, default=90)
    parser.add_argument("--budget", type=float, default=30)
    options = parser.parse_args()
    if options.summary:
        show(read(options.summary))
        return 0
    if not options.out or not options.suites:
        parser.error("name DIR=RESULTS and --out, or --summary")
    complete: dict[str, tuple[Path, dict[str, Any]]] = {}
    known = {line["problem"] for line in read(options.out) if not line["without"]}
    for pair in options.suites:
        folder, _, results = pair.partition("=")
        for record in read(Path(results)):
            line = line_of(record, "")
            complete[line["problem"]] = (Path(folder), line)
            if line["problem"] not in known:
                append_result(options.out, line)
    run_all(trials(complete, options.per_action), options)
    show(read(options.out))
    return 0


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of results; none if there is no such file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def run_all(trials: Sequence[Trial], options: argparse.Namespace) -> None:
    """Run the trials that the file of results does not have, several at a time, each on one GPU."""
    known = {(line["problem"], line["without"]) for line in read(options.out)}
    todo = [trial for trial in trials if (trial.problem, trial.without) not in known]
    devices = visible_devices() or [""]
    slots: queue.SimpleQueue[str] = queue.SimpleQueue()
    for job in range(options.jobs):
        slots.put(devices[job % len(devices)])

    def run(trial: Trial) -> None:
        device = slots.get()
        try:
            line = run_one(trial, device, options.time_limit, options.budget)
        finally:
            slots.put(device)
        append_result(options.out, line)
        print(f"{trial.problem} without {trial.without}: {line['verified']}", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(run, todo))


def run_one(trial: Trial, device: str, limit: float, budget: float) -> dict[str, Any]:
    """A line of results: times over eager, and the steps with their outcome."""
    with tempfile.TemporaryDirectory(prefix="mtmc-ablation-") as folder:
        out = Path(folder) / "result.jsonl"
        command = [
            sys.executable,
            "-m",
            "mtmc_lsp",
            "bench",
            str(trial.suite),
            "--filter",
            trial.problem,
            "--jobs",
            "1",
        ]
        command += ["--time-limit", str(limit), "--budget", str(budget), "--out", str(out)]
        command += ["--without", trial.without]
        environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": device} if device else {})}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        records = [record for record in read(out) if record["problem"] == trial.problem]
    if not records:
        raise SystemExit(f"{trial.problem} has no result: {done.stderr.strip()[-300:]}")
    return line_of(records[-1], trial.without)


def line_of(record: Mapping[str, Any], without: str) -> dict[str, Any]:
    """What is compared of a result of ``mtmc bench``."""
    speedup = (record.get("final") or {}).get("speedup") or {}
    verified = (speedup.get("vs_eager") or {}).get("ratio")
    return {
        **{name: record[name] for name in ("version", "commit", "problem", "level", "status", "wall_seconds")},
        "gpu": (record.get("environment") or {}).get("gpu", ""),
        "without": without,
        "verified": verified,
        "delivered": verified if record["status"] == "improved" and verified else 1.0,
        "seconds": record.get("seconds"),
        "steps": [[name_of(step), step["status"], gain_of(step)] for step in record.get("steps") or ()],
    }


def name_of(step: Mapping[str, Any]) -> str:
    """The action's name; for algebra, the rewrite rule."""
    action = step["action"]
    rule = action["params"].get("rule")
    return str(rule) if rule else str(action["kind"])


def gain_of(step: Mapping[str, Any]) -> float | None:
    """The ratio over the previous version, or None for a first kernel."""
    baselines = (step.get("timing") or {}).get("baselines", ())
    ratios = [item["speedup"]["ratio"] for item in baselines if item["name"] == "previous" and item["speedup"]]
    return ratios[0] if ratios else None


def trials(complete: Mapping[str, tuple[Path, Mapping[str, Any]]], most: int) -> list[Trial]:
    """For each name that was accepted, trials without it on the problems where it gained most."""
    gains: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for problem, (_, line) in complete.items():
        for name, status, gain in line["steps"]:
            if status == "accepted":
                gains[name].append((gain or line["verified"] or 0.0, problem))
    chosen = []
    for name in sorted(gains):
        problems = list(dict.fromkeys(problem for _, problem in sorted(gains[name], reverse=True)))[:most]
        chosen += [Trial(complete[problem][0], problem, name) for problem in problems]
    return chosen


def show(lines: Sequence[Mapping[str, Any]]) -> None:
    """For each name: how often it was tried and accepted, and the results with and without it, as a Markdown table."""
    counts: dict[str, list[int]] = {}
    whole = {line["problem"]: line for line in lines if not line["without"]}
    for line in whole.values():
        for name, status, _ in line["steps"]:
            count = counts.setdefault(name, [0, 0])
            count[0] += 1
            count[1] += status == "accepted"
    without: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for line in lines:
        if line["without"]:
            without[line["without"]].append(line)
    print(
        "| switched off | tried | accepted | problems | with it | without it | ratio | seconds with | seconds without |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name in sorted(counts, key=lambda name: (-counts[name][1], name)):
        pairs = [(whole[line["problem"]], line) for line in without[name]]
        cells = [name, *map(str, counts[name])]
        if pairs:
            first, second = (
                geometric_mean(line["verified"] or 1.0 for line in side) for side in zip(*pairs, strict=True)
            )
            seconds = [sum(line["seconds"] or 0 for line in side) / len(pairs) for side in zip(*pairs, strict=True)]
            cells += [str(len(pairs)), f"{first:.2f}x", f"{second:.2f}x", f"{first / second:.2f}"]
            cells += [f"{number:.1f}" for number in seconds]
        else:
            cells += [""] * 6
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    sys.exit(main())
