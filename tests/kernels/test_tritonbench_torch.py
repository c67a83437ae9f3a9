"""The functions of TritonBench-T: the inputs that their tests give them, and their tests on delivered files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from mtmc_lsp.app.bench.suite import Problem, problems_of_file
from mtmc_lsp.app.bench.tritonbench import SEPARATOR
from mtmc_lsp.app.bench.tritonbench_torch import evaluate, write_problems
from mtmc_lsp.capture.recorded_calls import argument_spec
from tests.cli.runner import mtmc

FILES = {
    "plain": ("def plain(x):\n    return torch.tanh(x)", "plain(torch.tensor([-1.0, 2.0]))"),
    "domain": ("def domain(x):\n    return torch.asin(x)", "domain(torch.tensor([-0.5, 0.75, 0.25]))"),
    "chance": (
        "def chance(n, p):\n    if (p < 0).any() or (p > 1).any():\n        raise ValueError('p')\n    return n * p",
        "chance(torch.tensor([-2.0, 3.0]), torch.tensor([0.5, 0.5]))",
    ),
    "factor": (
        "def factor(a):\n    return torch.linalg.cholesky(a)",
        "factor(torch.tensor([[4.0, 1.0], [1.0, 3.0]]))",
    ),
    "typed": (
        "def typed(x, dtype=None):\n    return x.sum(dtype=dtype)",
        "typed(torch.tensor([1.5, -2.0]), dtype=torch.float64)",
    ),
    "nested": (
        "def part(x):\n    return torch.sqrt(x)\n\n\ndef nested(x):\n    return part(x) + 1",
        "nested(torch.tensor([0.25, 4.0]))",
    ),
    "partly": ("def partly(x, y):\n    return x / y.reshape(-1)", "partly(torch.ones(2), torch.ones(2))"),
    "kernel": ("def kernel(x):\n    return x + 1", "kernel(torch.tensor([1.0, -2.0], device='cuda'))"),
    "drawn": ("def drawn(x):\n    return torch.dropout(x, 0.5, True)", "drawn(torch.ones(64))"),
}


def suite(folder: Path, names: list[str], further: str = "") -> Path:
    files = folder / "TritonBench_T_v1"
    files.mkdir()
    for name in names:
        code, call = FILES[name]
        test = f"def test_{name}():\n    results = {{}}\n    import {name} as file\n    results['one'] = file.{call}\n    results['two'] = torch.ones(3).numpy()\n    results['three'] = float(results['one'].sum())\n{further}    return results\n"
        text = f"import torch\n\n\n{code}\n\n\n{SEPARATOR}\n\nimport torch\n\n{test}\ntest_results = test_{name}()\n"
        (files / f"{name}.py").write_text(text)
    return folder


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("suite")
    written, left_out = write_problems(suite(folder, [*FILES]), folder / "problems", sys.executable)
    assert left_out == {}
    return {file.stem: file.read_text() for file in written}


@pytest.mark.parametrize(
    ("name", "directive"),
    [
        ("plain", "# mtmc: x=f32[2]\ndef plain("),
        ("domain", "# mtmc: x=f32[3]@-0.5..0.75\ndef domain("),
        ("chance", "# mtmc: n=f32[2] p=f32[2]@0..1\ndef chance("),
        ("nested", "# mtmc: x=f32[2]@0.25..4\ndef nested("),
    ],
)
def test_ranges_stay_where_the_function_needs_them_and_only_there(
    problems: dict[str, str], name: str, directive: str
) -> None:
    assert directive in problems[name]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("factor", "torch.tensor([[4.0, 1.0], [1.0, 3.0]], dtype=torch.float32)"),
        ("typed", "        torch.float64,"),
    ],
)
def test_values_that_no_range_describes_become_get_inputs(
    problems: dict[str, str], name: str, value: str, tmp_path: Path
) -> None:
    text = problems[name]
    assert value in text
    assert "# mtmc:" not in text
    file = tmp_path / f"{name}.py"
    file.write_text(text)
    assert [problem.target for problem in problems_of_file(file)] == [name]


def test_calls_before_a_failing_one_are_used(tmp_path: Path) -> None:
    root = suite(tmp_path, ["partly"], "    results['two'] = partly(torch.ones(2), torch.ones(3))\n")
    written, left_out = write_problems(root, tmp_path / "problems", sys.executable)
    assert left_out == {}
    assert "y=f32[2]" in written[0].read_text()


KERNEL = """import torch
import triton
import triton.language as tl


@triton.jit
def add_one(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n) + 1, mask=at < n)
"""
CHANGES = {
    "plain": ("torch.tanh(x)", "torch.sinh(x) / torch.cosh(x)"),
    "domain": ("torch.asin(x)", "torch.asin(x) + 0.01"),
    "nested": ("part(x) + 1", "(part(x) + 1).double()"),
    "factor": ("torch.linalg.cholesky(a)", "torch.nothing(a)"),
    "drawn": ("torch.dropout(x, 0.5, True)", "x * 2 * (torch.rand(64) < 0.5)"),
    "typed": ("def get_inputs", "def other_inputs"),
    "kernel": ("import torch\n", KERNEL + "\n\n"),
}


def problems_of(folder: Path) -> list[Problem]:
    # The change leaves "typed" without a workload, as a refused function is.
    return [Problem(file.stem, file, folder, "", file.stem) for file in sorted(folder.glob("*.py"))]


@pytest.fixture(scope="module")
def judged(problems: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    root = suite(tmp_path_factory.mktemp("judged"), [*CHANGES])
    folder = root / "problems"
    folder.mkdir()
    for name, (before, after) in CHANGES.items():
        assert before in problems[name]
        text = problems[name].replace(before, after)
        launch = "y = torch.empty_like(x)\n    add_one[(1,)](x, y, x.numel(), BLOCK=16)\n    return y"
        (folder / f"{name}.py").write_text(text.replace("return x + 1", launch))
    rows = evaluate(root, problems_of(folder), root / "results.jsonl", sys.executable)
    return {row["problem"].partition("::")[0]: row for row in rows}


@pytest.mark.parametrize(
    ("name", "call", "execution"),
    [
        ("plain", True, True),
        ("domain", True, False),
        ("nested", True, False),
        ("factor", False, False),
        ("drawn", True, None),
        ("typed", True, True),
        ("kernel", True, True),
    ],
    ids=["equal", "other values", "another dtype", "an exception", "random", "unchanged", "a kernel"],
)
def test_the_test_of_a_file_judges_what_is_delivered(
    judged: dict[str, dict[str, Any]], name: str, call: bool, execution: bool | None
) -> None:
    row = judged[name]
    assert (row["call"], row["execution"]) == (call, execution), row["why"]


def test_a_size_object_is_recorded_as_a_tuple() -> None:
    import torch

    from mtmc_lsp.capture.recorder.arguments import argument_record

    record = argument_record("size", torch.Size([2, 3]), torch)
    assert [item.constant for item in argument_spec(record).items] == [2, 3]


def test_a_result_that_reads_no_tensor_is_no_kernel(tmp_path: Path) -> None:
    body = "    return torch.ones(4, device=x.device).exp() * 2.0\n"
    (tmp_path / "model.py").write_text(f"import torch\n\n\n# mtmc: x=f32[4]\ndef f(x):\n{body}")
    answer = mtmc(tmp_path, "optimize", "model.py::f", "--json", CUDA_VISIBLE_DEVICES="")
    assert answer.document["status"] == "no_gain", answer.err
