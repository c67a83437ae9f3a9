"""The command line's contract: exit codes, one JSON document, errors with file, line and remedy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PLAIN = """import torch


# mtmc: x=f32[B,D] w=f32[D] B=32 D=64
def scale(x, w):
    h = torch.relu(x) * w
    return h + 1.0


def bare(x):
    return x + 1


# mtmc: x=f32[B,D] B=8 D=8
def nothing(x):
    x + 1


# mtmc: x=f32[B,D] B=8 D=8
def raises(x):
    y = x + 1
    return y @ x[:3]


# mtmc: x=f32[B,D] B=8 D=8
def branches(x):
    if x.sum() > 0:
        return x + 1
    return x


# mtmc: x=f32[B,D] B=8 D=8
def noisy(x):
    return x + noise()


STATE = [0.0]


def noise():
    STATE[0] += 1.0
    return STATE[0]
"""


def mtmc(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mtmc_lsp", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=250, check=False)


@pytest.mark.parametrize(
    ("name", "words", "line"),
    [
        ("missing", "no function, method, module or kernel called 'missing'", None),
        ("bare", "no example inputs are known for bare", 10),
        ("nothing", "returns nothing", 15),
        ("raises", "raises RuntimeError", 22),
        ("branches", "decides by the values of a tensor", 27),
        ("noisy", "gives different results for the same inputs", 33),
    ],
)
def test_a_request_that_is_wrong_names_file_line_and_remedy(user_file, name: str, words: str, line: int | None) -> None:
    path = user_file(PLAIN)
    done = mtmc(path.parent, "optimize", f"model.py::{name}", "--json")
    assert done.returncode == 2, done.stderr
    error = json.loads(done.stdout)["error"]
    assert words in error["message"]
    assert error["path"].endswith("model.py")
    assert line is None or error["line"] == line
    assert error["remedy"]


def test_a_file_that_is_not_there_is_told() -> None:
    done = mtmc(Path.cwd(), "optimize", "no_such_file.py::f")
    assert done.returncode == 2
    assert "no such file" in done.stderr


def test_optimising_without_a_gpu_verifies_compiles_applies_and_claims_no_time(user_file) -> None:
    path = user_file(PLAIN)
    done = mtmc(path.parent, "optimize", "model.py::scale", "--json", "--apply", "--arch", "sm_90")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["schema"] == 1
    assert document["status"] == "unmeasured"
    assert document["final"]["speedup"] is None
    step = document["steps"][0]
    assert step["status"] == "accepted"
    assert step["verdict"]["status"] == "correct"
    assert step["timing"] is None
    assert "+@triton.jit" in step["diff"]
    assert path.read_text() == document["final"]["source"]
    assert PLAIN.split("def scale")[1].split("\n", 1)[1] in path.read_text()

    listed = json.loads(mtmc(path.parent, "runs", "--json").stdout)["runs"]
    assert [(run["qualname"], run["status"]) for run in listed] == [("scale", "unmeasured")]
    exported = mtmc(path.parent, "export", listed[0]["id"])
    assert exported.returncode == 0, exported.stderr
    namespace: dict = {}
    exec(compile(exported.stdout.replace("@triton.jit", ""), "export.py", "exec"), {"__name__": "export"}, namespace)
    assert {"ModelNew", "get_inputs", "get_init_inputs"} <= set(namespace)


def test_a_planner_that_does_not_exist_is_refused(user_file) -> None:
    path = user_file(PLAIN)
    done = mtmc(path.parent, "optimize", "model.py::scale", "--planner", "oracle")
    assert done.returncode == 2
    assert "There is roofline" in done.stderr
