"""The files of TritonBench: how they are read, solved and counted."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest

from mtmc_lsp.app.bench.tritonbench import (
    SEPARATOR,
    KernelRecord,
    at_deadline,
    evaluate,
    kernel_problems,
    solve_kernels,
)
from mtmc_lsp.app.bench.tritonbench_inputs import measured_target
from mtmc_lsp.app.bench.tritonbench_summary import summarise_kernels
from mtmc_lsp.app.bench.tritonbench_torch import write_problems
from mtmc_lsp.app.kernels.opening import KernelTarget
from mtmc_lsp.app.target_file import open_target, parse_request
from mtmc_lsp.core.errors import RequestError
from mtmc_lsp.core.settings import Settings
from mtmc_lsp.core.workload import WorkloadSource
from tests.kernels.scaled_sum import KERNEL

LAUNCHER = """

def scaled_sum(x, scale):
    out = torch.empty_like(scale)
    scaled_sum_kernel[(x.shape[0],)](x, scale, out, x.shape[1], BLOCK=64)
    return out


"""
TEST = """


import torch

def test_scaled_sum():
    torch.manual_seed(0)
    return {"case": scaled_sum(torch.randn(3, 70, device="cuda"), torch.ones(3, device="cuda"))}

result_gold = test_scaled_sum()
print(result_gold)
"""
TORCH = (
    """import torch

def scaled(x, alpha=2.0):
    return torch.relu(x) * alpha

"""
    + SEPARATOR
    + """

def test_scaled():
    return {"one": scaled(torch.ones(4, 8, device="cuda")), "two": scaled(torch.ones(4, 8, device="cuda"), 3.0)}

test_results = test_scaled()
"""
)


def suite(tmp_path: Path, kernel: str = KERNEL) -> Path:
    folder = tmp_path / "data" / "TritonBench_G_v1"
    folder.mkdir(parents=True)
    (folder / "scaled_sum.py").write_text(kernel + LAUNCHER + SEPARATOR + TEST)
    return tmp_path


SCRIPT = """
import os
import sys

sys.path.append(os.path.abspath(os.path.join(os.path.dirname(__file__), "..")))

import torch
from performance_utils import Base
from TritonBench_v1.scaled_sum import scaled_sum


class performance_metrics(Base):
    def get_input_tensors(self):
        self.input_tensors = [(torch.randn(64, 2**i), torch.rand(64)) for i in (6, 12, 8)]

    def to_cuda(self, inputs):
        return tuple(item.cuda() for item in inputs)

    def call_op(self, inputs):
        return scaled_sum(*inputs)


if __name__ == "__main__":
    raise RuntimeError("the script is not to be run as a program")
"""
BASE = """
class Base:
    def __init__(self):
        self.input_tensors = []
"""


def with_script(tmp_path: Path, script: str = SCRIPT) -> Path:
    folder = tmp_path / "performance_metrics" / "perf_G"
    (folder / "golden_metrics").mkdir(parents=True)
    (folder / "performance_utils.py").write_text(BASE)
    (folder / "golden_metrics" / "scaled_sum_perf.py").write_text(script)
    return suite(tmp_path)


def measured(root: Path, cache: Path | None = None) -> KernelTarget | None:
    problem = kernel_problems(root)[0]
    opened = open_target(parse_request(f"{problem.file}::test_scaled_sum", Settings(), sys.executable))
    assert problem.script is not None
    return measured_target(opened, opened.definition, problem.script, sys.executable, cache)


def test_the_largest_inputs_of_a_performance_script_are_the_workload_and_the_test_is_observed(tmp_path: Path) -> None:
    target = measured(with_script(tmp_path), tmp_path / "inputs" / "scaled_sum.json")
    assert target is not None
    assert target.workload.target.qualname == "scaled_sum"
    shapes = {name: [size.value({}) for size in tensor.shape] for name, tensor in target.workload.tensors.items()}
    assert shapes == {"x": [64, 4096], "scale": [64]}
    assert target.observed_workload.source is WorkloadSource.SCRIPT
    assert target.launcher.qualname == "test_scaled_sum"
    script = kernel_problems(tmp_path)[0].script
    assert script is not None
    script.unlink()
    script.write_text("raise RuntimeError")
    assert measured(tmp_path, tmp_path / "inputs" / "scaled_sum.json") == target, "recorded calls are kept"


@pytest.mark.parametrize(
    "change",
    [
        ("torch.rand(64))", "torch.arange(64), torch.arange(64))"),
        ("return scaled_sum(*inputs)", "return inputs"),
        ("self.input_tensors = [", "self.input_tensors = [][0"),
    ],
    ids=["several tensors of indices", "no call", "an exception"],
)
def test_inputs_that_cannot_be_generated_leave_the_test_as_the_workload(
    tmp_path: Path, change: tuple[str, str]
) -> None:
    assert change[0] in SCRIPT
    kernel = "\n\ndef scaled_sum(x, scale, starts=None):\n"
    root = with_script(tmp_path, SCRIPT.replace(*change))
    file = kernel_problems(root)[0].file
    file.write_text(file.read_text().replace("\n\ndef scaled_sum(x, scale):\n", kernel))
    assert measured(root) is None


@pytest.mark.slow
def test_a_file_with_a_performance_script_is_judged_at_its_sizes(tmp_path: Path) -> None:
    problem = kernel_problems(with_script(tmp_path))[0]
    record = solve_kernels(problem, Settings(), sys.executable, 120.0, tmp_path / "delivered")
    assert record is not None
    assert record.inputs == "scaled_sum"
    assert record.runs and record.compiled and "autotune" in record.applied, record
    assert record.call is True and record.execution is True


@pytest.mark.slow
def test_a_file_is_optimised_and_the_delivered_one_prints_the_same(tmp_path: Path) -> None:
    problem = kernel_problems(suite(tmp_path))[0]
    record = solve_kernels(problem, Settings(), sys.executable, 120.0, tmp_path / "delivered")
    assert record is not None
    assert record.read and record.runs and record.compiled, record
    assert "hoist" in record.applied and "autotune" in record.applied
    assert record.call is True and record.execution is True
    assert "@triton.autotune(" in (tmp_path / "delivered" / "scaled_sum.py").read_text()
    summary = summarise_kernels([record.to_json()])
    assert (summary.files, summary.read, summary.delivered, summary.execution, summary.timed) == (1, 1, 1, 1, 0)
    assert summary.edits["hoist"] == 1


@pytest.mark.slow
def test_a_wrong_original_is_named_with_its_line(tmp_path: Path) -> None:
    wrong = KERNEL.replace("offsets < N, other", "offsets <= N, other")
    problem = kernel_problems(suite(tmp_path, wrong))[0]
    record = solve_kernels(problem, Settings(), sys.executable, 60.0, tmp_path / "delivered")
    assert record is not None
    assert "scaled_sum_kernel: it reads element 210 of x_ptr, which has 210" in record.fault


def test_a_file_that_the_time_limit_ends_has_no_record(tmp_path: Path) -> None:
    problem = kernel_problems(suite(tmp_path))[0]
    assert solve_kernels(problem, Settings(), sys.executable, 60.0, tmp_path, deadline=time.monotonic()) is None
    ended = threading.Event()
    with at_deadline(ended.set, time.monotonic()):
        assert ended.wait(30.0), "processes that run at the deadline end"


@pytest.mark.parametrize(
    ("ours", "first", "tuned", "call", "execution", "runs"),
    [
        ("1", "1", ["2"], True, True, 0),
        ("1", "0", ["1"], True, True, 1),
        ("1", None, ["1"], True, True, 1),
        ("1", "0", ["2", "2"], True, False, 2),
        ("1", "0", ["2", "3"], True, None, 2),
        (None, "0", [], False, None, 0),
        (None, None, [], None, None, 0),
    ],
)
def test_the_original_is_tuned_only_if_the_delivered_file_prints_something_else(
    tmp_path: Path,
    ours: str | None,
    first: str | None,
    tuned: list[str],
    call: bool | None,
    execution: bool | None,
    runs: int,
) -> None:
    problem = kernel_problems(suite(tmp_path))[0]
    left = list(tuned)

    def run(file: Path, *, tunes: bool = True) -> str | None:
        if file != problem.file:
            assert tunes, "the delivered file runs as it is"
            return ours
        return left.pop(0) if tunes else first

    record = KernelRecord("scaled_sum")
    evaluate(record, problem, "text", tmp_path / "delivered", run)
    assert (record.call, record.execution, len(tuned) - len(left)) == (call, execution, runs)


def test_a_script_that_calls_a_helper_without_a_launch_leaves_the_test_as_the_workload(tmp_path: Path) -> None:
    root = with_script(tmp_path, SCRIPT.replace("import scaled_sum", "import rows").replace("scaled_sum(*", "rows(*"))
    file = kernel_problems(root)[0].file
    file.write_text(file.read_text().replace(SEPARATOR, f"\n\ndef rows(x, scale):\n    return len(x)\n{SEPARATOR}"))
    assert measured(root) is None
    file.write_text(file.read_text().replace("return len(x)", "return scaled_sum(x, scale)"))
    assert measured(root) is not None


def test_a_folder_without_its_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="holds no files of TritonBench-G"):
        kernel_problems(tmp_path)
    with pytest.raises(RequestError, match="holds no files of TritonBench-T"):
        write_problems(tmp_path, tmp_path / "out", sys.executable)


def test_functions_get_the_inputs_of_their_tests_as_a_directive(tmp_path: Path) -> None:
    folder = tmp_path / "TritonBench_T_v1"
    folder.mkdir()
    (folder / "scaled.py").write_text(TORCH)
    (folder / "fails.py").write_text(TORCH.replace("torch.relu(x)", "torch.nothing(x)"))
    written, left_out = write_problems(tmp_path, tmp_path / "out", sys.executable)
    assert [file.name for file in written] == ["scaled.py"]
    assert "nothing" in left_out["fails"]
    text = written[0].read_text()
    assert (
        "# mtmc: x=f32[4,8]@1..1 alpha=2.0\ndef scaled(" in text or "# mtmc: x=f32[4,8] alpha=2.0\ndef scaled(" in text
    )
    assert "test_scaled" not in text


@pytest.mark.parametrize(("dtype", "is_generated"), [("int8", True), ("int32", False)])
def test_quantised_data_is_generated_and_tensors_of_several_indices_are_not(
    tmp_path: Path, dtype: str, is_generated: bool
) -> None:
    values = f"(torch.ones(64, 2**i, dtype=torch.{dtype}), torch.ones(64, dtype=torch.{dtype}))"
    script = SCRIPT.replace("(torch.randn(64, 2**i), torch.rand(64))", values)
    assert (measured(with_script(tmp_path, script)) is not None) == is_generated
