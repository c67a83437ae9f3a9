"""``--cluster`` of ``mtmc bench`` and ``mtmc explore``: what a user sees."""

from __future__ import annotations

import json
import shutil
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

CLUSTER = ("--cluster", "local:2")
KERNEL = """\
import torch, triton
import triton.language as tl


@triton.jit
def add_kernel(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n) + 1, mask=i < n)


# mtmc: x=f32[N] N=48
def add(x):
    out = torch.empty_like(x)
    add_kernel[(1,)](x, out, x.numel(), BLOCK=64)
    return out
"""
MODEL = """\
import torch

from scales import two


# mtmc: x=f32[N,64] w=f32[64,64] N=48
def f(x, w):
    y = torch.relu(x @ w) * two()
    return torch.softmax(y, -1) + y.mean(-1, keepdim=True)
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
    (suite / "model.py").write_text(MODEL)
    commands = (
        ("bench", "problems"),
        ("explore", "problems", "--out", "transitions"),
        ("optimize", "model.py::f"),
        ("evolve", "model.py::f"),
    )
    for command in commands:
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


def test_kernels_are_optimised_on_this_machine(suite: Path) -> None:
    (suite / "kernels.py").write_text(KERNEL)
    answer = mtmc(suite, "optimize", "kernels.py::add", "--cluster", "local:2")
    assert answer.code == 2
    assert "add consists of Triton kernels, which are optimised on this machine" in answer.err
    assert "Leave out --cluster." in answer.err


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_on_a_cluster_has_the_steps_that_it_has_on_this_machine(suite: Path) -> None:
    pytest.importorskip("distributed")
    here = {"CUDA_VISIBLE_DEVICES": ""}
    (suite / "model.py").write_text(MODEL)
    runs = [mtmc(suite, "optimize", "model.py::f", "--json", *cluster, **here) for cluster in ((), CLUSTER)]
    assert [run.code for run in runs] == [0, 0], runs[1].err
    assert "cluster local:2: 2 x CPU; dashboard http://127.0.0.1:" in runs[1].err
    steps = [[(s["action"]["text"], s["status"], s["diff"]) for s in run.document["steps"]] for run in runs]
    assert steps[0] == steps[1]
    assert runs[1].document["target"]["path"] == str(suite / "model.py")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_evolution_on_a_cluster_has_the_lineage_that_it_has_on_this_machine(suite: Path, tmp_path: Path) -> None:
    pytest.importorskip("distributed")
    here = {"CUDA_VISIBLE_DEVICES": "", "XDG_STATE_HOME": str(tmp_path / "state")}
    (suite / "model.py").write_text(MODEL)
    # Both begin at the best stored version, which is the same.
    assert mtmc(suite, "optimize", "model.py::f", **here).code == 0
    limits = ("--generations", "1", "--islands", "2", "--json")
    evolved = []
    for cluster in ((), CLUSTER):
        evolved.append(mtmc(suite, "evolve", "model.py::f", *limits, *cluster, **here))
        assert evolved[-1].code == 0, evolved[-1].err
        # The second evolution would prefer what the first one learned.
        shutil.rmtree(tmp_path / "state", ignore_errors=True)
    lineages = [
        [(v["number"], v["parent"], v["status"], v["reason"], v["diff"]) for v in run.document["versions"]]
        for run in evolved
    ]
    assert lineages[0] == lineages[1]
    assert len(lineages[0]) > 2
    assert mtmc(suite, "apply", evolved[1].document["run"], **here).code == 0
    assert mtmc(suite, "why", "model.py::f", **here).code in (0, 1)


@pytest.mark.gpu
def test_on_a_gpu_a_run_on_a_cluster_is_timed_and_evolves(suite: Path, tmp_path: Path) -> None:
    pytest.importorskip("distributed")
    here = {"XDG_STATE_HOME": str(tmp_path / "state")}
    (suite / "model.py").write_text(MODEL.replace("N=48", "N=65536"))
    run = mtmc(suite, "optimize", "model.py::f", "--budget", "120", "--json", "--cluster", "local", **here)
    assert run.code == 0, run.err
    assert run.document["status"] == "improved"
    accepted = [step for step in run.document["steps"] if step["status"] == "accepted"]
    assert all(step["timing"] is not None and step["verdict"] is not None for step in accepted)
    limits = ("--generations", "2", "--islands", "2", "--json", "--cluster", "local")
    evolved = mtmc(suite, "evolve", "model.py::f", *limits, **here)
    assert evolved.code == 0, evolved.err
    assert evolved.document["setup"]["has_gpu"]
    scores = [score for version in evolved.document["versions"] for score in version["scores"]]
    assert scores
    assert all(score["us"] > 0 for score in scores)
