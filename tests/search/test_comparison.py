"""Comparisons of planners: equal conditions, resumption, and what counts."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtmc_lsp.app.bench.comparison import running
from mtmc_lsp.app.bench.comparison.running import Comparison, Contest, mixed, read_runs
from mtmc_lsp.app.bench.comparison.summary import run_of, summarise_comparison
from mtmc_lsp.app.bench.jobs import LocalJobs
from mtmc_lsp.app.bench.runner import Plan
from mtmc_lsp.app.bench.suite import Problem
from mtmc_lsp.core.errors import RequestError
from mtmc_lsp.core.settings import Settings

NAMES = ("roofline-greedy", "ranker-greedy", "random")
PROGRAM = (
    sys.executable,
    "-c",
    "import json, pathlib, sys; request = json.load(sys.stdin)\n"
    "assert request['fresh']\n"
    "answer = {'status': 'unmeasured', 'steps': [], 'planner': request['settings']['planner'], 'store': request['store']}\n"
    "pathlib.Path(sys.argv[1]).write_text(json.dumps(answer))",
)


def contests(folder: Path, count: int = 3, seconds: float = 5.0) -> list[Contest]:
    plans = {
        name: Plan(replace(Settings(), planner=running.ENTRANTS[name].planner), sys.executable, seconds, {})
        for name in NAMES
    }
    found = []
    for number in range(count):
        path = folder / f"level{number % 2 + 1}" / f"{number}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"# {number}\n")
        problem = Problem(f"level{number % 2 + 1}/{number}", path, folder, f"level{number % 2 + 1}")
        found.append(Contest(problem, problem.level, plans))
    return found


def run(folder: Path, several: list[Contest], seconds: float = 600.0) -> list[str]:
    """The new runs as ``problem entrant``, in their order."""
    with LocalJobs(1) as jobs:
        comparison = Comparison(folder / "runs.jsonl", jobs, seconds, program=PROGRAM)
        return [f"{r['problem']} {r['entrant']}" for _, records in comparison.run(several) for r in records]


def test_the_order_of_the_planners_rotates_from_problem_to_problem(tmp_path: Path) -> None:
    done = run(tmp_path, contests(tmp_path))
    first, second, third = NAMES
    assert [each.split()[1] for each in done] == [first, second, third, second, third, first, third, first, second]
    records = read_runs(tmp_path / "runs.jsonl")
    assert {record["planner"] for record in records} == {"roofline", "ranker", "random"}
    assert len({record["store"] for record in records}) == len(NAMES), "no planner continues a run of another one"
    positions = [record["position"] for record in records if record["entrant"] == first]
    assert sorted(positions) == [0, 1, 2]


def test_the_first_run_on_a_machine_has_more_time_and_counts_for_nothing(tmp_path: Path) -> None:
    several = contests(tmp_path, count=1)
    waiting = PROGRAM[2].replace(
        "assert request['fresh']\n", "pathlib.Path(request['store'], str(request['seconds'])).touch()\n"
    )
    with LocalJobs(1) as jobs:
        comparison = Comparison(tmp_path / "runs.jsonl", jobs, 600.0, program=(*PROGRAM[:2], waiting))
        comparison.warm_up(several[0])
        assert read_runs(tmp_path / "runs.jsonl") == []
        assert len(list(comparison.run(several))) == 1
    folder = tmp_path / ".mtmc" / "comparison"
    assert [file.name for file in (folder / "warm-up").iterdir()] == ["15.0"]
    assert [file.name for file in (folder / "random").iterdir()] == ["5.0"]


def test_a_comparison_that_was_ended_goes_on(tmp_path: Path) -> None:
    several = contests(tmp_path)
    whole = run(tmp_path, several)
    out = tmp_path / "runs.jsonl"
    lines = out.read_text().splitlines()
    # As a kill in the middle of a line would leave it.
    out.write_text("\n".join([*lines[:4], lines[4][:40]]))
    assert run(tmp_path, several) == whole[4:]
    assert len(read_runs(out)) == len(whole)
    assert run(tmp_path, several) == []


def test_no_run_starts_that_could_end_too_late(tmp_path: Path) -> None:
    assert run(tmp_path, contests(tmp_path, seconds=5.0), seconds=4.0) == []


def test_a_problem_is_not_started_if_its_runs_do_not_fit(tmp_path: Path) -> None:
    """Half a problem says nothing."""
    several = contests(tmp_path, count=1, seconds=5.0)
    slow = {"entrant": "random", "key": "other", "wall_seconds": 4.0, "problem": "x", "status": "improved"}
    (tmp_path / "runs.jsonl").write_text(json.dumps(slow) + "\n")
    assert run(tmp_path, several, seconds=12.0) == []
    assert len(run(tmp_path, several, seconds=60.0)) == 3


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text('{"problem": "x"}\n{"problem": "y"}\n')
    with pytest.raises(RequestError, match=r"runs\.jsonl:1: this line is no run"):
        read_runs(path)


def test_problems_come_in_turn_from_each_group(tmp_path: Path) -> None:
    order = [contest.group for contest in mixed(contests(tmp_path, 8))]
    assert order == ["level1", "level2"] * 4


# The summary ------------------------------------------------------------------------------------------------------


def step(index: int, ratio: float, *, status: str = "accepted", verdict: str | None = "correct") -> dict[str, Any]:
    speedup = {"ratio": ratio, "low": ratio, "high": ratio}
    compiled = {"ratio": ratio / 2, "low": ratio / 2, "high": ratio / 2}
    baselines = [
        {"name": "eager", "median_us": 100.0, "speedup": speedup},
        {"name": "compile", "median_us": 50.0, "speedup": compiled},
    ]
    timing = {"median_us": 100.0 / ratio, "baselines": baselines, "best": "compile"}
    return {"index": index, "status": status, "verdict": verdict and {"status": verdict}, "timing": timing}


def record(problem: str, entrant: str, ratios: Mapping[int, float], **changes: object) -> dict[str, Any]:
    """A run whose accepted versions have these speedups, one every ten seconds."""
    return {
        "problem": problem,
        "level": problem.split("/")[0],
        "entrant": entrant,
        "key": problem,
        "version": "1",
        "commit": "abc",
        "status": "improved" if ratios else "no_gain",
        "wall_seconds": 30.0,
        "steps": [step(index, ratio) for index, ratio in ratios.items()],
        "progress": [[10.0 * index, index, "accepted"] for index in ratios],
        **changes,
    }


def test_a_run_tells_what_was_verified_after_how_many_candidates_and_seconds() -> None:
    found = run_of(record("level1/a", "random", {1: 1.5, 3: 3.0}))
    assert found.speedup == 3.0 and found.baseline_gain == 2.0
    assert [found.after(count) for count in range(4)] == [1.0, 1.5, 1.5, 3.0]
    assert [found.after_seconds(seconds) for seconds in (9, 10, 29, 30)] == [1.0, 1.5, 1.5, 3.0]


def test_versions_that_are_wrong_or_were_never_accepted_do_not_count() -> None:
    steps = [step(1, 5.0, verdict="incorrect"), step(2, 4.0, status="rejected"), step(3, 2.0)]
    found = run_of(record("level1/a", "random", {}, status="improved", steps=steps, progress=[[7.0, 3, "accepted"]]))
    assert found.candidates == 3 and found.speedup == 2.0
    assert found.after(2) == 1.0 and found.after(3) == 2.0
    unchanged = run_of(record("level1/a", "random", {1: 1.01}, status="no_gain"))
    assert unchanged.speedup == 1.0 and unchanged.after(1) == 1.0, "the file stays as it was"


def test_only_problems_that_all_planners_ended_count() -> None:
    whole = [record("level1/a", name, {1: 2.0}) for name in NAMES]
    missing = [record("level1/b", name, {1: 9.0}) for name in NAMES[:2]]
    late = [record("level2/c", name, {1: 9.0}, status="timeout" if name == "random" else "improved") for name in NAMES]
    full = [record("level2/d", name, {1: 9.0}) for name in NAMES]
    full[0]["steps"][0]["failure"] = "gpu_out_of_memory"
    summary = summarise_comparison([*whole, *missing, *late, *full], NAMES)
    assert [group.problems for group in summary.groups] == [1]
    assert summary.left_out == {
        "not run with all planners": 1,
        "timeout with some planners": 1,
        "out of memory beside other problems": 1,
    }


def test_means_are_geometric_relative_to_the_reference_and_by_group() -> None:
    runs = []
    for number, ratio in enumerate((1.0, 4.0, 1.0, 4.0)):
        problem = f"level{number % 2 + 1}/{number}"
        runs.append(record(problem, NAMES[0], {1: 2.0}))
        runs.append(record(problem, NAMES[1], {1: 2.0 * ratio}))
        runs.append(record(problem, NAMES[2], {}))
    summary = summarise_comparison(runs, NAMES)
    whole, first, second = summary.groups
    assert [group.name for group in summary.groups] == ["", "level1", "level2"]
    ranker = whole.standings[NAMES[1]]
    assert ranker.relative is not None and ranker.relative.value == pytest.approx(2.0)
    assert ranker.relative.low == pytest.approx(1.0) and ranker.relative.high == pytest.approx(4.0)
    assert ranker.over_eager is not None and ranker.over_eager.value == pytest.approx(4.0)
    # The best baseline is twice as fast as eager mode in each problem, also where a planner's run did not time it.
    assert ranker.over_best is not None and ranker.over_best.value == pytest.approx(2.0)
    chance = whole.standings[NAMES[2]]
    assert chance.over_best is not None and chance.over_best.value == pytest.approx(0.5) and chance.faster == 0
    assert ranker.by_candidates == pytest.approx((1.0, 4.0))
    assert first.standings[NAMES[1]].by_candidates[-1] == pytest.approx(2.0)
    assert second.standings[NAMES[1]].by_candidates[-1] == pytest.approx(8.0)
    index = summary.marks.index(10)
    assert ranker.by_seconds[index - 1] == 1.0 and math.isclose(ranker.by_seconds[index], 4.0)


def test_runs_without_a_gpu_are_counted_and_have_no_means() -> None:
    runs = [record("level1/a", name, {}, status="unmeasured") for name in NAMES]
    (group,) = summarise_comparison(runs, NAMES).groups
    assert group.problems == 1
    assert all(item.over_eager is None and item.by_seconds == () for item in group.standings.values())
