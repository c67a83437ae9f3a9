"""``mtmc bench --verified``: KernelBench-Verified's evaluator judges the exported file of what was delivered.

The evaluator here has the functions of the suite's ``src/eval.py``, for the CPU: the suite's own need a GPU.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mtmc_lsp.app.bench.suite import Problem, find_problems
from mtmc_lsp.app.bench.verified import check_copy, check_gpu, evaluate, scores, write_problems
from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.errors import EnvironmentNotAble, RequestError
from mtmc_lsp.core.run import SCHEMA, Final, RunResult, RunStatus, Step, StepStatus
from mtmc_lsp.process.project_files import FOLDER
from mtmc_lsp.report.bench_tables import show_verified
from mtmc_lsp.report.console import console
from mtmc_lsp.search.store import Store
from mtmc_lsp.source.targets import find_target
from tests.cli.runner import mtmc
from tests.codegen.checker import Checker
from tests.codegen.harness import fused

PROBLEM = """import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.rand(width))

    def forward(self, x):
        return torch.softmax(x * self.gain, -1)


def get_inputs():
    return [torch.rand(4, 32)]


def get_init_inputs():
    return [32]
"""
HIDDEN = """import torch


def get_hidden_inputs():
    return [[torch.rand(4, 32) * factor] for factor in (1.0, 3.0, 0.01, -1.0)]
"""
EVALUATOR = """import os
import time
from types import SimpleNamespace

import torch

from . import utils

FOLDER = os.path.dirname(os.path.dirname(__file__))


def set_seed(seed):
    torch.manual_seed(seed)


def _process_input_tensor(x, device, precision):
    return x.to(device=device, dtype=precision) if isinstance(x, torch.Tensor) else x


def load_original_model_and_inputs(text, context):
    exec(text, context)
    return context["Model"], context["get_init_inputs"], context["get_inputs"]


def get_hidden_test_path(level, number):
    path = os.path.join(FOLDER, "hidden_tests", f"level{level}", f"{number}_hidden.py")
    return path if os.path.exists(path) else None


def time_execution_with_cuda_event(call, *inputs, num_trials, verbose, device):
    times = []
    for _ in range(num_trials):
        began = time.perf_counter()
        call(*inputs)
        times.append((time.perf_counter() - began) * 1000)
    return times


def get_timing_stats(times, device):
    return {"mean": sum(times) / len(times)}


def get_memory_stats(call, *inputs, device):
    return {"peak_bytes": call(*inputs).nbytes + sum(x.nbytes for x in inputs)}


def eval_kernel_against_ref(reference, exported, seed_num, num_correct_trials, num_perf_trials, measure_performance, device,
                            precision, hidden_test_path):
    assert torch.get_float32_matmul_precision() == "high" and "KB_FP32_TOL" not in os.environ
    context, hidden = {}, {}
    make, init, inputs = load_original_model_and_inputs(reference, context)
    exec(exported, context)
    exec(open(hidden_test_path).read(), hidden)
    set_seed(seed_num)
    model = make(*init())
    set_seed(seed_num)
    new = context["ModelNew"](*init())
    for tensors in hidden["get_hidden_inputs"]():
        if not torch.allclose(model(*tensors), new(*tensors), atol=1e-3, rtol=1e-3):
            return SimpleNamespace(correctness=False, runtime=-1.0, peak_memory=-1.0, metadata={"hidden": "mismatch"})
    tensors = inputs()
    # As in the suite, the timer runs outside of torch.no_grad().
    assert torch.is_grad_enabled() and not new(*tensors).requires_grad, "the user's code runs, not the kernels"
    times = time_execution_with_cuda_event(new, *tensors, num_trials=num_perf_trials, verbose=False, device=device)
    return SimpleNamespace(correctness=True, runtime=sum(times) / len(times),
                           peak_memory=get_memory_stats(new, *tensors, device=device)["peak_bytes"], metadata={})
"""
UTILS = """from dotenv import load_dotenv
from google import genai
from together import Together
import anthropic

load_dotenv()
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A small copy of the suite with two problems."""
    for name, text in {
        "src/__init__.py": "", "src/eval.py": EVALUATOR, "src/utils.py": UTILS,
        "KernelBench/level1/1_Softmax.py": PROBLEM, "KernelBench/level1/2_Softmax.py": PROBLEM,
        "hidden_tests/level1/1_hidden.py": HIDDEN, "hidden_tests/level1/2_hidden.py": HIDDEN,
    }.items():  # fmt: skip
        file = tmp_path / "suite" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path / "suite"


@pytest.fixture
def user_checker(tmp_path: Path) -> Iterator[Checker]:
    folder = tmp_path / "checker"
    folder.mkdir()
    checker = Checker(folder)
    yield checker
    checker.close()


def stored(out: Path, problem: Problem, checker: Checker, change: tuple[str, str] = ("", "")) -> None:
    """A run that delivered one kernel for a problem, in the store and in the file of results."""
    text = problem.path.read_text()
    capture = checker.capture(text, "Model")
    nodes = [node.name for node in capture.graph.nodes]
    candidate = fused(capture, text, nodes=nodes)
    source = candidate.source.replace(*change) if change[0] else candidate.source
    action = MacroAction(ActionKind.FUSE, tuple(nodes), (0, 0), {})
    step = Step(1, action, StepStatus.ACCEPTED, "", "", candidate)
    target = find_target(problem.path.read_bytes(), str(problem.path), "Model")
    with Store(out.parent / FOLDER) as store:
        run = store.begin(str(problem.path), "Model", "hash", capture.environment)
        final = Final(source, "", None, None)
        environment, workload, status = capture.environment, capture.workload, RunStatus.IMPROVED
        store.finish(RunResult(SCHEMA, run, target, workload, environment, (), (step,), final, status, 0.0, "hash"))
    with out.open("a") as file:
        file.write(json.dumps({"problem": problem.name, "id": run, "status": "improved", "key": run}) + "\n")


def test_problems_allow_tf32_as_the_baselines_of_the_suite_do(checkout: Path, tmp_path: Path) -> None:
    folder = write_problems(checkout, tmp_path / "problems")
    assert [problem.name for problem in find_problems(folder)] == ["level1/1_Softmax", "level1/2_Softmax"]
    text = (folder / "level1/1_Softmax.py").read_text()
    assert text == PROBLEM + '\n\ntorch.set_float32_matmul_precision("high")\n'
    assert (checkout / "KernelBench/level1/1_Softmax.py").read_text() == PROBLEM


def test_the_evaluator_judges_exported_files_and_resumes(
    checkout: Path, tmp_path: Path, user_checker: Checker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The reference's compiled version is eager here: its compiler is not the subject, and takes a minute.
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    monkeypatch.setenv("KB_FP32_TOL", "100")
    out, file = tmp_path / "results.jsonl", tmp_path / "results.verified.jsonl"
    problems = find_problems(write_problems(checkout, tmp_path / "problems"))
    stored(out, problems[0], user_checker)
    rows = list(evaluate(checkout, problems, out, file, sys.executable, device="cpu"))
    assert [(row["problem"], row["delivered"], row.get("correct")) for row in rows] == [
        ("level1/1_Softmax", True, True),
        ("level1/2_Softmax", False, None),
    ]
    baselines = rows[0]["baselines"]
    assert rows[0]["ms"] > 0 and baselines["eager"]["ms"] > 0 and baselines["compile"]["ms"] > 0
    assert rows[0]["bytes"] == baselines["eager"]["bytes"] == 2 * 4 * 32 * 4
    exported = (tmp_path / "results.verified.exported/level1/1_Softmax.py").read_text()
    with Store(tmp_path / FOLDER) as store:
        final = store.result(json.loads(out.read_text())["id"]).final.source
    kernel = final[final.index("@triton.jit") : final.index("def _can_launch_on")]
    assert kernel in exported
    # A second call takes the answer from the file.
    (checkout / "src/eval.py").write_text("raise RuntimeError('not evaluated again')")
    again = list(evaluate(checkout, problems, out, file, sys.executable, device="cpu"))
    assert again == rows
    assert len(file.read_text().splitlines()) == len(problems), "a line for each problem"


def test_wrong_and_failing_files_are_not_correct(
    checkout: Path, tmp_path: Path, user_checker: Checker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    out, file = tmp_path / "results.jsonl", tmp_path / "results.verified.jsonl"
    problems = find_problems(write_problems(checkout, tmp_path / "problems"))
    stored(out, problems[0], user_checker, ("return torch.softmax(x * self.gain, -1)", "return x"))
    stored(out, problems[1], user_checker, ("import torch\n", "raise OSError('no disk')\n"))
    first, second = evaluate(checkout, problems, out, file, sys.executable, device="cpu")
    assert (first["correct"], first["why"]) == (False, "{'hidden': 'mismatch'}")
    assert (second["correct"], second["why"]) == (None, "OSError: no disk")
    score = scores([first, second])[0]
    assert (score.problems, score.delivered, score.correct, score.over_eager) == (2, 2, 0, None)


def row(name: str, ms: float, eager: float, compiled: float | None, memory: float) -> dict[str, object]:
    baselines = {"eager": {"ms": eager, "bytes": memory}, "compile": {"ms": compiled, "bytes": 1.0}}
    return {
        "problem": name, "level": name.split("/")[0], "delivered": True, "correct": True, "ms": ms, "bytes": 1.0,
        "baselines": baselines,
    }  # fmt: skip


def test_scores_count_files_that_stayed_as_they_were(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        row("level1/1_a", 1.0, 4.0, 2.0, 9.0),
        row("level2/1_b", 1.0, 16.0, 0.5, 1.0),
        row("level2/2_c", 1.0, 2.0, None, 1.0),
        {"problem": "level2/3_d", "level": "level2", "delivered": False},
    ]
    everything, first, second = scores(rows)
    assert (everything.level, everything.problems, everything.delivered, everything.correct) == ("all", 4, 3, 3)
    assert everything.over_eager == pytest.approx((4 * 16 * 2 * 1) ** 0.25)
    assert everything.over_best == pytest.approx((2 * 0.5 * 2) ** (1 / 3))
    assert (everything.slower, first.slower, second.slower) == (1, 0, 1)
    assert (first.memory, second.memory) == (pytest.approx(9.0), pytest.approx(1.0))
    show_verified(console(), [everything, first, second])
    shown = capsys.readouterr().out
    assert "level1" in shown and "4.00x" in shown and "9.00x" in shown


def test_a_folder_that_is_no_copy_is_an_error_with_the_command_that_makes_one(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    answer = mtmc(tmp_path, "bench", "--verified", ".")
    assert answer.code == 2
    assert answer.err == (
        "error: .: this is no copy of KernelBench-Verified: it has no src/eval.py\n"
        "  git clone https://github.com/facebookresearch/kernel_bench_verified, and name that folder.\n"
    )


def test_other_problems_are_not_evaluated(checkout: Path, tmp_path: Path) -> None:
    answer = mtmc(tmp_path, "bench", "problems", "--verified", "suite")
    assert (answer.code, answer.err) == (
        2,
        "error: --verified has its problems already\n  Leave out DIR and --suite; choose problems with --filter.\n",
    )


def test_without_a_gpu_the_error_says_what_cannot_run(checkout: Path) -> None:
    check_copy(checkout)
    check_gpu("NVIDIA H200")
    with pytest.raises(EnvironmentNotAble) as raised:
        check_gpu("")
    assert str(raised.value).startswith(
        "KernelBench-Verified cannot run without a CUDA GPU: its checks, its hidden inputs, its timer and its memory figures"
    )
    (checkout / "hidden_tests/level1/1_hidden.py").unlink()
    with pytest.raises(RequestError, match=r"it has no src/eval\.py"):
        check_copy(checkout / "src")
