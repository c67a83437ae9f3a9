"""`mtmc verify` where the reference's calls are under autocast: both run under it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.runner import mtmc

REFERENCE = """import torch
import torch.nn.functional as F


# mtmc: x=f32[B,64] w=f32[64,64] B=32 autocast=f16
def scores(x, w):
    return F.softmax(x @ w, -1)
"""
CANDIDATE = """import torch
import triton
import triton.language as tl


@triton.jit
def softmax_kernel(x_ptr, out_ptr, N: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, N)
    x = tl.load(x_ptr + row * N + cols).to(tl.float32)
    e = tl.exp(x - tl.max(x, axis=0))
    tl.store(out_ptr + row * N + cols, e / tl.sum(e, axis=0))


def scores(x, w):
    h = (x @ w).contiguous()
    assert h.dtype == torch.float16
    out = torch.empty(h.shape, dtype=torch.float32, device=h.device)
    softmax_kernel[(h.shape[0],)](h, out, N=64)
    return out
"""


@pytest.mark.slow
def test_a_candidate_runs_under_the_autocast_of_the_workload(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'user'\n")
    (tmp_path / "reference.py").write_text(REFERENCE)
    (tmp_path / "right.py").write_text(CANDIDATE)
    (tmp_path / "wrong.py").write_text(CANDIDATE.replace("tl.sum(e, axis=0))", "tl.sum(e, axis=0) * 1.1)"))
    right = mtmc(tmp_path, "verify", "reference.py::scores", "right.py::scores", "--json", CUDA_VISIBLE_DEVICES="")
    assert right.code == 0, right.out
    wrong = mtmc(
        tmp_path, "verify", "reference.py::scores", "wrong.py::scores", "--out", "why.py", CUDA_VISIBLE_DEVICES=""
    )
    assert wrong.code == 1 and "result 0 values" in wrong.out
    # The failing case is a program with the same autocast.
    done = subprocess.run([sys.executable, "why.py"], cwd=tmp_path, capture_output=True, text=True, timeout=800)
    assert done.returncode == 1 and "result 0 is wrong" in done.stdout, done.stdout + done.stderr
