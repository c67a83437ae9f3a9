"""``mtmc verify`` of a candidate whose reference takes tuples, dataclasses, further arguments and expanded tensors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.runner import mtmc

REFERENCE = """from dataclasses import dataclass

import torch


@dataclass
class Config:
    weight: torch.Tensor
    eps: float = 1e-5


# mtmc: x=f32[N,D] pair=(f32[N,D],f32[N,D]{0,1}) config=Config(weight=f32[D],eps=1e-5) more=(f32[D],) N=13 D=24
def combined(x, pair, config, *more):
    y = x * pair[0] + pair[1] + config.eps
    return y * config.weight + more[0]
"""
CANDIDATE = """import torch
import triton
import triton.language as tl
from reference import Config


@triton.jit
def kernel(x_ptr, a_ptr, b_ptr, w_ptr, c_ptr, out_ptr, columns, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < columns
    x = tl.load(x_ptr + row * columns + cols, mask=mask)
    a = tl.load(a_ptr + row * columns + cols, mask=mask)
    b = tl.load(b_ptr + row * columns + cols, mask=mask)
    w = tl.load(w_ptr + cols, mask=mask)
    c = tl.load(c_ptr + cols, mask=mask)
    tl.store(out_ptr + row * columns + cols, (x * a + b + eps) * w + c, mask=mask)


def fast(x, pair, config, *more):
    assert type(config) is Config and type(pair) is tuple
    tensors = [item.contiguous() for item in (x, *pair, config.weight, *more)]
    out = torch.empty_like(tensors[0])
    if out.numel():
        block = triton.next_power_of_2(out.shape[1])
        kernel[(out.shape[0],)](*tensors, out, out.shape[1], config.eps, BLOCK=block)
    return out
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "reference.py").write_text(REFERENCE)
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'user'\n")
    return tmp_path


def test_a_correct_candidate_gets_the_same_containers(folder: Path) -> None:
    (folder / "candidate.py").write_text(CANDIDATE)
    answer = mtmc(folder, "verify", "reference.py::combined", "candidate.py::fast", "--json", CUDA_VISIBLE_DEVICES="")
    assert answer.document["verdict"]["status"] == "correct", answer.document["verdict"]["reason"]


def test_a_wrong_candidate_is_shown_by_a_file_that_builds_the_containers(folder: Path) -> None:
    (folder / "candidate.py").write_text(CANDIDATE.replace("x * a + b + eps", "x * a + b - eps - 1"))
    answer = mtmc(folder, "verify", "reference.py::combined", "candidate.py::fast", "--json", CUDA_VISIBLE_DEVICES="")
    assert answer.code == 1
    run = [sys.executable, answer.document["reproduction"]]
    seen = subprocess.run(run, capture_output=True, text=True, timeout=800)
    assert (seen.returncode, "result 0 is wrong" in seen.stdout) == (1, True), seen.stdout + seen.stderr
    (folder / "candidate.py").write_text(CANDIDATE)
    mended = subprocess.run(run, capture_output=True, text=True, timeout=800)
    assert mended.returncode == 0, mended.stdout + mended.stderr


def test_a_candidate_that_does_not_name_the_class_is_told_so(folder: Path) -> None:
    without = CANDIDATE.replace("from reference import Config\n", "").replace("type(config) is Config and ", "")
    (folder / "candidate.py").write_text(without)
    answer = mtmc(folder, "verify", "reference.py::combined", "candidate.py::fast", CUDA_VISIBLE_DEVICES="")
    assert answer.code == 2
    assert "an argument of the reference is a Config, which the candidate's file does not name" in answer.err
    assert "Import Config at the top of the file." in answer.err
