"""The files of TritonBench: how they are read, solved and counted."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest

from mtmc_lsp.app.bench.tritonbench import SEPARATOR, at_deadline, kernel_problems, solve_kernels, summarise_kernels
from mtmc_lsp.app.bench.tritonbench_torch import write_problems
from mtmc_lsp.core.errors import RequestError
from mtmc_lsp.core.settings import Settings
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
