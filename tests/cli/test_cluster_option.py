"""``--cluster`` of ``mtmc bench`` and ``mtmc explore``: what a user sees."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from runner import mtmc, project

PROBLEM = """\
import torch

from scales import two

class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) * two()

def get_inputs():
    return [torch.rand(8, 48)]
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """Two problems that import a module of their project."""
    project(tmp_path, "x = 1\n", '[tool.mtmc]\narchs = ["sm_90"]\n')
    (tmp_path / "problems").mkdir()
    (tmp_path / "scales.py").write_text("def two():\n    return 2\n")
    for number in (1, 2):
        (tmp_path / "problems" / f"{number}_p.py").write_text(f"{PROBLEM}# {number}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--cluster", "localhost:8786"), 2, "cannot read --cluster localhost:8786"),
        (("--cluster", "local", "--jobs", "2"), 2, "a worker of a cluster runs one problem at a time"),
        (("--cluster", "tls://127.0.0.1:1"), 3, "needs Dask's TLS files, and none are configured"),
        (("--cluster", "tcp://127.0.0.1:1"), 3, "the cluster tcp://127.0.0.1:1 does not answer"),
    ],
)
def test_a_cluster_that_cannot_be_used_is_one_clear_message(
    suite: Path, arguments: tuple[str, ...], code: int, words: str
) -> None:
    pytest.importorskip("distributed")
    began = time.monotonic()
    answer = mtmc(suite, "bench", "problems", *arguments)
    assert answer.code == code
    assert words in answer.err
    assert "Traceback" not in answer.err
    assert time.monotonic() - began < 60
    assert not (suite / "results.jsonl").exists()


def test_without_dask_the_message_is_the_command_that_installs_it(suite: Path, tmp_path: Path) -> None:
    (tmp_path / "hidden" / "distributed").mkdir(parents=True)
    missing = "raise ModuleNotFoundError(\"No module named 'distributed'\", name='distributed')\n"
    (tmp_path / "hidden" / "distributed" / "__init__.py").write_text(missing)
    for command in (("bench", "problems"), ("explore", "problems", "--out", "transitions")):
        answer = mtmc(suite, *command, "--cluster", "local:2", PYTHONPATH=str(tmp_path / "hidden"))
        assert answer.code == 3
        assert "--cluster needs the package distributed" in answer.err
        assert "pip install 'mtmc-lsp[cluster]'" in answer.err


@pytest.mark.slow
def test_bench_and_explore_on_a_cluster_of_this_machine(suite: Path) -> None:
    pytest.importorskip("distributed")
    out = ("--out", "r.jsonl", "--time-limit", "150")
    first = mtmc(suite, "bench", "problems", "--cluster", "local:2", *out, "--json")
    assert first.code == 0, first.err
    assert "cluster local:2: 2 x CPU; dashboard http://127.0.0.1:" in first.err
    assert first.document["summary"]["scores"][0]["statuses"] == {"unmeasured": 2}
    assert str(suite) not in (suite / "r.jsonl").read_text()
    records = [json.loads(line) for line in (suite / "r.jsonl").read_text().splitlines()]
    again = mtmc(suite, "bench", "problems", "--cluster", "local:2", *out)
    assert "2 of 2 results are from before" in again.err
    exported = mtmc(suite, "export", records[0]["id"], "--out", "kernel.py")
    assert exported.code == 0, exported.err
    pytest.importorskip("pyarrow")
    tree = ("--out", "transitions", "--seconds", "40", "--depth", "1", "--width", "2")
    explored = mtmc(suite, "explore", "problems", "--cluster", "local:2", *tree, "--json")
    assert explored.code == 0, explored.err
    assert explored.document["summary"]["programs"] == 2
