"""Targets that cannot be captured as a whole: the runs of statements between the lines that cut them are optimised in place."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from runner import mtmc, project

from mtmc_lsp.source.compose import strip_generated
from mtmc_lsp.verify.worker.interpreter.source import on_cpu

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
FILE = '''\
import logging

import torch
import torch.nn.functional as F
from torch import nn

LOG = logging.getLogger(__name__)


# mtmc: x=f32[N,64] w=f32[64,64] N=24
def talks(x, w):
    """Prints in the middle."""
    h = F.gelu(x @ w)
    # The mean of each row.
    h = h / (h.abs().mean(-1, keepdim=True) + 1e-3)
    print("shape", tuple(h.shape))
    y = torch.softmax(h * 2.0, dim=-1)
    return y * torch.sigmoid(h)


# mtmc: x=f32[N,64] y=f32[N,64] N=24
def masked_loss(x, y):
    d = F.smooth_l1_loss(x, y, reduction="none")
    d = d * torch.sigmoid(x) + 0.1 * d * d
    picked = d[d > 0.3]
    scale = picked.mean() + 1.0
    out = (d * scale).exp().clamp(max=10.0)
    return out.sum(-1).mean()


class Checked(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.proj = nn.Linear(width, width)

    # mtmc: x=f32[B,T,32] B=2 T=12 init: width=32
    def forward(self, x):
        B, T, D = x.shape
        h = F.silu(self.proj(self.norm(x)))
        if h.abs().max() > 1e4:
            raise ValueError("overflow")
        h = (F.gelu(h) * torch.sigmoid(x)).view(B * T, D)
        return h / h.norm(dim=-1, keepdim=True)


# mtmc: x=f32[N,64] N=16
def in_place(x):
    a = torch.sigmoid(x) * torch.tanh(x) + 1.0
    b = a.clone()
    LOG.warning("half of %d", len(x))
    b.add_(1.0)
    return torch.relu(a * b) + torch.exp(-b)


# mtmc: x=f32[N,64] N=16
def nothing_left(x):
    print(x.shape)
    y = x[x > 0]
    return y


# mtmc: x=f32[N,64] N=16
def shares(x):
    y = torch.relu(x) + 1.0
    row = y[0]
    print(row.shape)
    row.zero_()
    return torch.softmax(y, -1) * torch.sigmoid(y)
'''


def optimised(folder: Path, name: str) -> tuple[str, dict[str, Any]]:
    """The text of the file after ``optimize --apply``, and the document of the run."""
    file = project(folder, FILE)
    answer = mtmc(folder, "optimize", f"model.py::{name}", "--apply", "--json", "--arch", "sm_90", **NO_GPU)
    assert answer.code == 0, answer.err
    text = file.read_text()
    assert strip_generated(text.encode(), name).decode() == FILE
    return text, answer.document


def accepted(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for step in document["steps"] if step["status"] == "accepted"]


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, dict[str, Any]]:
    """A folder in which ``talks`` was optimised, the text of its file, and the document of the run."""
    folder = tmp_path_factory.mktemp("talking")
    return folder, *optimised(folder, "talks")


def test_the_runs_before_and_after_a_print_are_optimised_in_place(talking) -> None:
    _, text, document = talking
    body = text[text.index("def talks(") : text.index("# mtmc: x=f32[N,64] y=f32")]
    assert (
        body
        == '''\
def talks(x, w):
    """Prints in the middle."""
    if talks_region_1_fits(x, w):  # mtmc: dispatch
        h = (talks_region_1_triton if torch.compiler.is_compiling() else talks_region_1_launch)(x, w)
    else:
        h = F.gelu(x @ w)
        # The mean of each row.
        h = h / (h.abs().mean(-1, keepdim=True) + 1e-3)
    print("shape", tuple(h.shape))
    if talks_region_2_fits(h):  # mtmc: dispatch
        return (talks_region_2_triton if torch.compiler.is_compiling() else talks_region_2_launch)(h)
    y = torch.softmax(h * 2.0, dim=-1)
    return y * torch.sigmoid(h)


'''
    )
    notes = document["workload"]["assumed"]
    assert "only lines 13 to 15 and lines 17 to 18 are optimised, in place: line 16 prints" in notes
    assert {step["region"] for step in accepted(document)} == {1, 2}
    checks = [check for step in accepted(document) for check in step["verdict"]["checks"]]
    assert {check["status"] for check in checks if check["name"] == "whole target"} == {"passed"}


DRIVER = """\
import torch
import plain_talks, with_regions

torch.manual_seed(0)
x, w = torch.randn(19, 64), torch.randn(64, 64)
expected = plain_talks.talks(x, w)
assert with_regions.talks_region_1_fits(x, w) and with_regions.talks_region_2_fits(x)
torch.testing.assert_close(with_regions.talks(x, w), expected)
"""


def test_the_kernels_of_regions_compute_what_eager_pytorch_computes_and_the_print_stays(talking) -> None:
    """In a process of its own: Triton reads at import whether it interprets kernels."""
    folder, text, _ = talking
    (folder / "plain_talks.py").write_text(FILE)
    (folder / "with_regions.py").write_text(on_cpu(text, FILE))
    (folder / "driver.py").write_text(DRIVER)
    variables = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "driver.py"]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "shape (19, 64)\n" * 2


def test_a_file_with_regions_is_optimised_again_to_the_same_text(talking) -> None:
    folder, text, _ = talking
    answer = mtmc(folder, "optimize", "model.py::talks", "--apply", "--json", "--arch", "sm_90", **NO_GPU)
    assert answer.code == 0, answer.err
    assert (folder / "model.py").read_text() == text


def test_the_plan_shows_the_actions_of_all_regions(tmp_path: Path) -> None:
    project(tmp_path, FILE)
    answer = mtmc(tmp_path, "plan", "model.py::talks", **NO_GPU)
    assert answer.code == 0, answer.err
    assert "line 16 prints" in answer.out.replace("\n", " ")
    assert "in lines 13 to 15" in answer.out
    assert "in lines 17 to 18" in answer.out


@pytest.mark.parametrize("name", ["masked_loss", "Checked", "in_place"])
def test_targets_with_one_line_that_cuts_them_are_optimised(name: str, tmp_path: Path) -> None:
    text, document = optimised(tmp_path, name)
    assert document["status"] == "unmeasured"
    regions = {step["region"] for step in accepted(document)}
    assert regions == {1, 2}
    assert text.count("# mtmc: dispatch") == 2
    checks = [check for step in accepted(document) for check in step["verdict"]["checks"]]
    assert [check for check in checks if check["status"] == "failed"] == []


def test_the_sizes_of_a_region_stay_free(tmp_path: Path) -> None:
    text, _ = optimised(tmp_path, "Checked")
    guard = text[text.index("def checked_region_2_fits(") :].split("\n\n\n")[0]
    assert "B == 2" not in guard
    assert "T == 12" not in guard


def test_a_target_without_a_region_is_refused_with_each_line_that_cuts_it(tmp_path: Path) -> None:
    project(tmp_path, FILE)
    answer = mtmc(tmp_path, "optimize", "model.py::nothing_left", "--json", **NO_GPU)
    assert (answer.code, answer.error["code"]) == (2, "unsupported")
    lines = answer.error["message"].splitlines()
    assert lines == [
        "nothing_left cannot be captured, and no part of it computes enough for a kernel:",
        f"    line {FILE.splitlines().index('    print(x.shape)') + 1} prints",
        f"    line {FILE.splitlines().index('    y = x[x > 0]') + 1} creates a tensor whose size depends on the values of a "
        "tensor, as x[mask] does",
    ]
    assert answer.error["line"] == FILE.splitlines().index("    print(x.shape)") + 1


def test_a_view_that_a_later_line_writes_into_is_not_a_result_of_a_region(tmp_path: Path) -> None:
    text, document = optimised(tmp_path, "shares")
    assert {step["region"] for step in accepted(document)}
    body = text[text.index("def shares(") :]
    assert "row = y[0]\n    print(row.shape)" in body
    assert "row" not in body[: body.index("row = y[0]")]
