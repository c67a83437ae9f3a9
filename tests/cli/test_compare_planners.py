"""``scripts/compare_planners.py`` from the problems to the report, without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from runner import project
from test_bench_command import GOOD, REFUSED

SCRIPT = Path(__file__).parents[2] / "scripts" / "compare_planners.py"


def compare(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *words], cwd=folder, capture_output=True, text=True, timeout=800, check=False
    )


@pytest.mark.slow
def test_planners_are_compared_on_the_problems_that_all_of_them_end(tmp_path: Path) -> None:
    project(tmp_path, "x = 1\n", '[tool.mtmc]\narchs = ["sm_90"]\n')
    for name, text in {"level1/1_good": GOOD, "level2/1_refused": REFUSED}.items():
        path = tmp_path / "problems" / f"{name}.py"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    words = ("problems", "--out", "runs.jsonl", "--planners", "roofline-greedy,ranker-beam,random")
    limits = ("--budget", "60", "--time-limit", "90", "--seconds", "280", "--jobs", "1")
    done = compare(tmp_path, *words, *limits)
    assert done.returncode == 0, done.stderr
    runs = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    good = {run["entrant"]: run for run in runs if run["problem"] == "level1/1_good"}
    assert {run["status"] for run in good.values()} == {"unmeasured"}
    assert "The random policy" in good["random"]["steps"][0]["action"]["rationale"]
    assert "The random policy" not in good["roofline-greedy"]["steps"][0]["action"]["rationale"]
    assert str(tmp_path) not in (tmp_path / "runs.jsonl").read_text()
    report = (tmp_path / "runs.md").read_text()
    assert "## All: 1 problems that all planners ended" in report
    assert "Not counted: 1 problems (refused with all planners)" in report
    assert json.loads((tmp_path / "runs.json").read_text())["groups"][0]["problems"] == 1
    again = compare(tmp_path, *words, *limits)
    assert again.returncode == 0 and len((tmp_path / "runs.jsonl").read_text().splitlines()) == len(runs)
    assert compare(tmp_path, "--summary", "runs.jsonl", "--report", "other.md").stdout.startswith("# Planners")


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    for words, message in (
        (("--planners", "oracle"), "there is no planner oracle"),
        (("x", "--out", "r", "--planners", "lm-greedy"), "lm-greedy needs --lm"),
        (("--out", "r"), "name suites and --out, or --summary"),
        (("nowhere", "--out", "r"), "there is no suite nowhere"),
    ):
        refused = compare(tmp_path, *words)
        assert refused.returncode != 0 and message in refused.stderr
