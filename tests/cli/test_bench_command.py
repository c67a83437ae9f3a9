"""``mtmc bench`` as a user runs it, without a GPU."""

from __future__ import annotations

import json
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
