"""Which problems a bench runs, how it survives them, and what it notes."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from mtmc_lsp.app.bench import processes
from mtmc_lsp.app.bench import runner as benches
from mtmc_lsp.app.bench.jobs import LocalJobs
from mtmc_lsp.app.bench.runner import Bench, Plan, append_result, read_results
from mtmc_lsp.app.bench.suite import Problem, Shard, choose, find_problems, parse_shard
from mtmc_lsp.app.provenance import Build
from mtmc_lsp.core.errors import RequestError
from mtmc_lsp.core.settings import Settings

PROBLEM = """\
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        return x + 1

def get_inputs():
    return [torch.rand(4)]
"""
WHOLE = Shard()
PLAN = Plan(Settings(), sys.executable, 2.0, {"torch": "2.13"})
ANSWER = "import json, pathlib, sys; request = json.load(sys.stdin); name = pathlib.Path(request['path']).stem\n"
ACTING = """
if name.startswith('hang'):
    import signal, time
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    time.sleep(60)
if name.startswith('die'):
    print('last words', flush=True)
    import os
    os._exit(7)
pathlib.Path(sys.argv[1]).write_text(json.dumps({'status': 'unmeasured', 'steps': []}))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two levels with problems, and files that are none."""
    for name in ("level1/10_b", "level1/2_a", "level2/1_c", "level2/hang", "level2/die"):
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(PROBLEM)
    (tmp_path / "level1" / "helper.py").write_text("def get_inputs():\n    return []\n")
    (tmp_path / "level1" / "broken.py").write_text("class Model(:\n")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "1_x.py").write_text(PROBLEM)
    return tmp_path


def test_functions_and_modules_with_a_directive_are_problems(tmp_path: Path) -> None:
    text = "# mtmc: x=f32[N] N=64\ndef double(x):\n    return x + x\n\n\ndef helper(x):\n    return x\n\n\n"
    text += PROBLEM.split("\n\ndef get_inputs")[0].replace(
        "    def forward", "    # mtmc: x=f32[N] N=64\n    def forward"
    )
    text += "\n\n\n# mtmc: x=f32[\ndef mistaken(x):\n    return x\n"
    (tmp_path / "own.py").write_text(text)
    assert [(problem.name, problem.target) for problem in find_problems(tmp_path)] == [
        ("own::Model.forward", "Model.forward"),
        ("own::double", "double"),
        ("own::mistaken", "mistaken"),
    ]


def run(folder: Path, problems: list[Problem], *, jobs: int = 2, plan: Plan = PLAN, fresh: bool = False, **more):
    with LocalJobs(jobs, **more) as local:
        bench = Bench(plan, folder / "results.jsonl", local, program=(sys.executable, "-c", ANSWER + ACTING))
        return {problem.name: (record, known) for problem, record, known in bench.run(problems, fresh=fresh)}


def test_problems_are_found_by_what_they_hold_and_ordered_by_level_and_number(folder: Path) -> None:
    found = find_problems(folder)
    assert [p.name for p in found] == ["level1/2_a", "level1/10_b", "level2/1_c", "level2/die", "level2/hang"]
    assert [p.level for p in found] == ["level1"] * 2 + ["level2"] * 3
    assert [p.level for p in find_problems(folder / "level1")] == ["level1"] * 2


def test_a_folder_without_problems_says_what_a_problem_is(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no problem"):
        find_problems(tmp_path)
    with pytest.raises(RequestError, match="no such folder"):
        find_problems(tmp_path / "missing")


def test_a_filter_a_shard_and_a_limit_choose(folder: Path) -> None:
    problems = find_problems(folder)

    def names(pattern: str = "", limit: int | None = None, shard: Shard = WHOLE) -> list[str]:
        return [p.name.partition("/")[2] for p in choose(problems, pattern, limit, shard)]

    assert names("level2/*") == ["1_c", "die", "hang"]
    assert names("_a") == ["2_a"]
    assert names(limit=2) == ["2_a", "1_c"], "one of each level"
    parts = [names(shard=Shard(i, 3)) for i in (1, 2, 3)]
    assert sorted(name for part in parts for name in part) == sorted(names()), "every problem is in one shard"
    assert parse_shard("2/4") == Shard(2, 4)
    for wrong in ("0/2", "3/2", "1", "a/b"):
        with pytest.raises(RequestError, match="--shard"):
            parse_shard(wrong)


def test_problems_that_hang_or_die_are_noted_and_the_others_go_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that hangs also ignores being asked to stop."""
    monkeypatch.setattr(processes, "END_SECONDS", 1.0)
    monkeypatch.setattr(processes, "STOP_SECONDS", 0.5)
    began = time.monotonic()
    found = run(folder, find_problems(folder))
    assert time.monotonic() - began < 20
    statuses = {name: record["status"] for name, (record, _) in found.items()}
    assert statuses.pop("level2/hang") == "timeout"
    assert statuses.pop("level2/die") == "crashed"
    assert set(statuses.values()) == {"unmeasured"}
    assert len(statuses) == 3
    assert found["level2/die"][0]["error"]["message"] == "its process ended with code 7: last words"


def test_a_result_is_made_once_and_again_when_what_it_depends_on_changes(folder: Path) -> None:
    problems = find_problems(folder / "level1")
    assert not any(known for _, known in run(folder, problems).values())
    assert all(known for _, known in run(folder, problems).values())
    assert not any(known for _, known in run(folder, problems, fresh=True).values())
    assert not any(
        known for _, known in run(folder, problems, plan=replace(PLAN, environment={"torch": "2.14"})).values()
    )
    problems[0].path.write_text(PROBLEM + "# another text\n")
    assert [known for _, known in sorted(run(folder, problems).values(), key=lambda item: item[1])] == [False, False]
    assert len(read_results(folder / "results.jsonl")) == 2, "the newest of each problem"


def test_a_result_names_the_build_that_made_it_and_is_made_again_by_another_build(folder: Path, monkeypatch) -> None:
    problems = find_problems(folder / "level1")
    monkeypatch.setattr(benches, "current_build", lambda: Build("1.2.3", "abc-dirty"))
    for record, _ in run(folder, problems).values():
        assert (record["version"], record["commit"]) == ("1.2.3", "abc-dirty")
    monkeypatch.setattr(benches, "current_build", lambda: Build("1.2.3", "def"))
    assert not any(known for _, known in run(folder, problems).values())


PATHS = """
error = {'message': f"{request['path']}:3 fails in /usr/lib/python3/torch/nn.py", 'path': request['path']}
pathlib.Path(sys.argv[1]).write_text(json.dumps({'status': 'refused', 'error': error, 'source': '/a/b'}))
"""


def test_a_result_contains_no_absolute_path(folder: Path) -> None:
    with LocalJobs() as jobs:
        bench = Bench(PLAN, folder / "results.jsonl", jobs, program=(sys.executable, "-c", ANSWER + PATHS))
        [(_, record, _)] = bench.run(choose(find_problems(folder), "2_a", None, WHOLE))
    assert record["error"] == {"message": "level1/2_a.py:3 fails in nn.py", "path": "level1/2_a.py"}
    assert record["source"] == "/a/b", "code is not changed"
    assert str(folder) not in (folder / "results.jsonl").read_text()


def test_each_problem_runs_on_one_gpu_of_those_that_are_there(folder: Path) -> None:
    told = "pathlib.Path(sys.argv[1]).write_text(json.dumps({'status': os.environ['CUDA_VISIBLE_DEVICES']}))\n"
    program = (sys.executable, "-c", f"import os\n{ANSWER}import time; time.sleep(0.3)\n{told}")
    with LocalJobs(2, devices=["3", "5"]) as jobs:
        bench = Bench(PLAN, folder / "results.jsonl", jobs, program=program)
        found = [record["status"] for _, record, _ in bench.run(find_problems(folder))]
    assert set(found) == {"3", "5"}


SHORT = """
tried = pathlib.Path(request['path']).with_suffix('.tried')
alone = tried.exists()
tried.touch()
reason = '' if alone or name != '1_c' else 'Model does not fit in memory on this workload'
step = {'status': 'failed' if reason else 'accepted', 'reason': reason, 'failure': 'out_of_memory' if reason else None}
pathlib.Path(sys.argv[1]).write_text(json.dumps({'status': 'no_gain' if reason else 'improved', 'steps': [step]}))
"""


def test_what_lacked_memory_beside_others_is_run_again_alone_at_the_end(folder: Path) -> None:
    with LocalJobs(2, devices=["0"]) as jobs:
        bench = Bench(PLAN, folder / "results.jsonl", jobs, program=(sys.executable, "-c", ANSWER + SHORT))
        found = [(problem.name, record["status"]) for problem, record, _ in bench.run(find_problems(folder))]
    assert found[-1] == ("level2/1_c", "improved")
    assert len(found) == len(read_results(folder / "results.jsonl")) == 5


def test_a_line_that_was_cut_off_is_left_out_and_the_next_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    append_result(path, {"problem": "a", "key": "1"})
    with path.open("a") as file:
        file.write('{"problem": "b", "ke')
    assert [r["problem"] for r in read_results(path)] == ["a"]
    append_result(path, {"problem": "c", "key": "3"})
    assert [r["problem"] for r in read_results(path)] == ["a", "c"]
    assert json.loads(path.read_text().splitlines()[-1])["problem"] == "c"


def test_a_file_that_is_no_list_of_results_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text('{"something": "else"}\n')
    with pytest.raises(RequestError, match="not a result"):
        read_results(path)
