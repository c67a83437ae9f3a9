"""``mtmc bench`` as a user runs it, without a GPU."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from runner import mtmc, project

GOOD = """\
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2

def get_inputs():
    return [torch.rand(8, 48)]
"""
ENDS = GOOD.replace("return [torch", "import os; os._exit(3); return [torch")
REFUSED = GOOD.replace("torch.relu(x) * 2", "x * 2 if x.sum() > 0 else x")


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a problem that works, one that is refused, and one that ends its process; run once."""
    folder = tmp_path_factory.mktemp("suite")
    project(folder, "x = 1\n", '[tool.mtmc]\narchs = ["sm_90"]\n')
    for name, text in {"level1/1_good": GOOD, "level1/2_ends": ENDS, "level2/1_refused": REFUSED}.items():
        path = folder / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return folder


def test_a_suite_is_run_once_and_summarised_by_level(suite: Path) -> None:
    first = mtmc(suite, "bench", ".", "--json", "--jobs", "2", "--time-limit", "120", "--out", "r.jsonl")
    assert first.code == 0, first.err
    scores = {score["level"]: score for score in first.document["summary"]["scores"]}
    assert scores[""]["statuses"] == {"unmeasured": 1, "crashed": 1, "refused": 1}
    assert scores["level1"]["correct"] == 1
    assert scores["level2"]["correct"] == 0
    assert not any(means["count"] for means in scores[""]["means"]), "nothing is timed without a GPU"
    good = next(r for line in (suite / "r.jsonl").read_text().splitlines() if "stages" in (r := json.loads(line)))
    assert {"capturing", "planning", "compiling", "verifying"} <= set(good["stages"])
    assert [[index, status] for _, index, status in good["progress"]] == [
        [step["index"], step["status"]] for step in good["steps"]
    ]
    times = [seconds for seconds, _, _ in good["progress"]]
    assert times == sorted(times) and times[0] > 0 and times[-1] <= good["wall_seconds"]
    assert "version" in good and "commit" in good
    assert str(suite) not in (suite / "r.jsonl").read_text()
    assert sum(good["stages"].values()) <= good["wall_seconds"]
    again = mtmc(suite, "bench", ".", "--jobs", "1", "--time-limit", "120", "--out", "r.jsonl")
    assert "3 of 3 results are from before" in again.err
    assert "nothing was timed" in again.out
    alone = mtmc(suite, "bench", "--summary", "r.jsonl")
    assert alone.code == 0
    assert "crashed: the process ended with exit code N" in alone.out
    assert [line.split()[0] for line in alone.out.splitlines() if "%" in line] == ["all", "level1", "level2"]
    first_line, *other_lines = (suite / "r.jsonl").read_text().splitlines()
    mixed = [json.dumps({**json.loads(first_line), "commit": "another"}), *other_lines]
    (suite / "mixed.jsonl").write_text("\n".join(mixed) + "\n")
    refused = mtmc(suite, "bench", "--summary", "mixed.jsonl")
    assert refused.code == 2
    assert "commit another" in refused.err
    assert "--mixed" in refused.err
    assert "commit another" in mtmc(suite, "bench", "--summary", "mixed.jsonl", "--mixed").out
    assert not (suite / "level1" / ".mtmc").exists(), "the problems' own folder is left alone"


def test_what_is_asked_wrongly_is_said_with_the_remedy(suite: Path) -> None:
    for arguments, words in (
        (("--summary", "none.jsonl"), "there is no file"),
        ((".", "--filter", "level9/*"), "no problem is left"),
    ):
        answer = mtmc(suite, "bench", *arguments)
        assert answer.code == 2, arguments
        assert words in answer.err


def test_a_suite_of_installed_packages_runs_what_is_installed_and_counts_the_rest(tmp_path: Path) -> None:
    package, suite = tmp_path / "site" / "toy", tmp_path / "toys"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "scales.py").write_text("def scale():\n    return 2.0\n")
    (package / "layers.py").write_text(
        "import torch\n\nfrom .scales import scale\n\n\ndef scaled(x):\n    return torch.relu(x) * scale()\n"
    )
    (tmp_path / "site" / "toy-1.0.dist-info").mkdir()
    (tmp_path / "site" / "toy-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n"
    )
    target = '[[targets]]\nname = "{}"\nworkload = ["x=f32[B,48] B=8"]\ntags = ["toy"]\n'
    (suite / "packages").mkdir(parents=True)
    for name, module in (("toy", "toy.layers::scaled"), ("absent-package", "absent.layers::scaled")):
        manifest = f'package = "{name}"\nversion = "1.0"\n{target.format(module)}'
        (suite / "packages" / f"{name}.toml").write_text(manifest)
    path = os.pathsep.join([str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
    answer = mtmc(tmp_path, "bench", str(suite), "--json", "--arch", "sm_90", "--out", "r.jsonl", PYTHONPATH=path)
    assert answer.code == 0, answer.err
    assert "1 of 2 problems are skipped, because their packages are not installed" in answer.err
    assert f"pip install -r {suite / 'requirements.txt'}" in answer.err
    score = answer.document["summary"]["scores"][0]
    assert (score["problems"], score["statuses"]) == (2, {"unmeasured": 1, "not_run": 1})
    assert answer.document["summary"]["not_run"] == ["absent.layers::scaled"]
    assert [path.name for path in suite.rglob("*.py")] == []
    # The halves follow from the names: toy.layers is for looking, absent.layers for reporting.
    shown = mtmc(tmp_path, "bench", str(suite), "--half", "looking", "--summary", "r.jsonl", "--json")
    assert shown.document["summary"]["scores"][0]["statuses"] == {"unmeasured": 1}
    shown = mtmc(tmp_path, "bench", str(suite), "--half", "reporting", "--summary", "r.jsonl", "--json")
    assert shown.document["summary"]["scores"][0]["statuses"] == {"not_run": 1}


def test_a_wrong_suite_or_half_is_refused_with_the_remedy(suite: Path) -> None:
    for arguments, words in (
        (("--suite", "nothing"), "there is no suite nothing"),
        ((".", "--suite", "public"), "both a folder and --suite are named"),
        ((".", "--half", "looking"), "--half is for suites of installed packages"),
        (("--suite", "public", "--half", "left"), "--half left does not exist"),
    ):
        answer = mtmc(suite, "bench", *arguments)
        assert answer.code == 2, arguments
        assert words in answer.err


def test_a_limit_for_all_problems_is_refused_where_it_has_no_effect(suite: Path) -> None:
    answer = mtmc(suite, "bench", ".", "--seconds", "60")
    assert answer.code == 2
    assert "--seconds limits --suite tritonbench-g alone" in answer.err
    assert "--time-limit" in answer.err
