"""A whole evolution as a user runs it, by Triton's interpreter: nothing is faked."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))
from runner import mtmc, project

MODEL = """\
import torch


# mtmc: x=f32[N,64] w=f32[64,64] N=48
def f(x, w):
    y = torch.relu(x @ w) * 2
    return torch.softmax(y, -1) + y.mean(-1, keepdim=True)
"""


@pytest.mark.slow
def test_a_target_evolves_on_the_cpu_from_its_file_to_kernels_in_it(tmp_path: Path) -> None:
    file = project(tmp_path, MODEL)
    here = {"CUDA_VISIBLE_DEVICES": "", "XDG_STATE_HOME": str(tmp_path / "state")}
    evolved = mtmc(tmp_path, "evolve", "model.py::f", "--generations", "2", "--arch", "sm_90", "--json", **here)
    assert evolved.code == 0, evolved.err
    document = evolved.document
    assert document["result"]["status"] == "unmeasured"
    assert not document["setup"]["has_gpu"]
    assert len([version for version in document["versions"] if version["operator"] == "catalogue"]) > 1
    best = document["versions"][document["best"]]
    assert best["gain"] > 1.5
    assert all(step["verdict"]["status"].startswith("correct") for step in document["result"]["steps"])
    checks = document["result"]["steps"][-1]["verdict"]["checks"]
    assert any(check["name"].endswith("values") and check["status"] == "passed" for check in checks)
    assert file.read_text() == MODEL
    shown = mtmc(tmp_path, "lineage", **here)
    assert f"How version {best['number']} got faster" in shown.out
    assert mtmc(tmp_path, "apply", document["run"], **here).code == 0
    assert "mtmc: dispatch" in file.read_text()
    assert mtmc(tmp_path, "why", "model.py::f", **here).code in (0, 1)
    assert "lesson: " in mtmc(tmp_path, "knowledge", "fuse", "--limit", "20", **here).out
