"""``mtmc optimize``, ``apply`` and ``undo`` of kernels that are already in a file, as a user runs them."""

from __future__ import annotations

from pathlib import Path

import pytest
from runner import mtmc, project

from tests.kernels.scaled_sum import KERNEL, LAUNCHER

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
TEST = """

def scaled_sum(x, scale):
    out = torch.empty_like(scale)
    scaled_sum_kernel[(x.shape[0],)](x, scale, out, x.shape[1], BLOCK=64)
    return out


def test_scaled_sum():
    return scaled_sum(torch.randn(3, 70, device="cuda"), torch.ones(3, device="cuda"))


expected = test_scaled_sum()
print(expected)
"""


def test_edits_of_a_kernel_are_verified_applied_and_taken_out_again(tmp_path: Path) -> None:
    file = project(tmp_path, KERNEL + LAUNCHER)
    answer = mtmc(tmp_path, "optimize", "model.py::scaled_sum_kernel", **NO_GPU)
    assert answer.code == 0, answer.err
    assert "Load scale_ptr once above the loop in scaled_sum_kernel" in answer.out
    assert "same results as your code on small inputs in Triton's interpreter" in answer.out
    assert "relative error" not in answer.out, "none was measured"
    assert "unmeasured: no CUDA GPU" in answer.out
    assert file.read_text() == KERNEL + LAUNCHER
    applied = mtmc(tmp_path, "apply")
    assert applied.code == 0, applied.err
    assert "mtmc undo" in applied.out
    text = file.read_text()
    assert "    scale = tl.load(scale_ptr + row)\n    for start in range(0, N, BLOCK):" in text
    assert "@triton.autotune(" in text
    again = mtmc(tmp_path, "apply")
    assert again.code != 0, again.out
    assert "or contain its edits already" in again.err
    # The user goes on elsewhere in the file.
    file.write_text(f"import math\n{text}\n\nLIMIT = math.inf\n")
    undone = mtmc(tmp_path, "undo")
    assert undone.code == 0, undone.err
    assert file.read_text() == f"import math\n{KERNEL}{LAUNCHER}\n\nLIMIT = math.inf\n"
    nothing = mtmc(tmp_path, "undo")
    assert nothing.code != 0


@pytest.mark.slow
def test_the_test_of_a_file_is_the_workload_of_its_kernels(tmp_path: Path) -> None:
    project(tmp_path, KERNEL + TEST)
    answer = mtmc(tmp_path, "optimize", "model.py::scaled_sum", "--json", **NO_GPU)
    assert answer.code == 0, answer.err
    document = answer.document
    assert document["workload"]["source"] == "script"
    changes = [step["action"]["params"]["change"] for step in document["steps"] if step["status"] == "accepted"]
    assert "hoist" in changes
    assert changes[-1] == "autotune"
    assert all(step["verdict"]["checks"] for step in document["steps"])


@pytest.mark.slow
def test_a_wrong_original_is_a_finding_with_its_smallest_case(tmp_path: Path) -> None:
    wrong = KERNEL.replace("mask=offsets < N, other=0.0", "mask=offsets <= N, other=0.0")
    project(tmp_path, wrong + LAUNCHER)
    answer = mtmc(tmp_path, "optimize", "model.py::scaled_sum", "--json", **NO_GPU)
    assert answer.code == 0, answer.err
    notes = answer.document["notes"]
    assert any("the kernel as it stands is wrong with" in note and "element" in note for note in notes)


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        (KERNEL, (), "no function of the file launches scaled_sum_kernel"),
        (KERNEL + LAUNCHER, ("--planner", "llm"), "Leave out --resume, --planner llm and --coder llm."),
        (
            KERNEL.replace("BLOCK)\n        x", "BLOCK) + helper\n        x") + LAUNCHER,
            (),
            "scaled_sum runs on none of",
        ),
    ],
)
def test_a_request_that_cannot_be_served_is_one_clear_error(
    tmp_path: Path, text: str, arguments: tuple[str, ...], message: str
) -> None:
    project(tmp_path, text)
    answer = mtmc(tmp_path, "optimize", "model.py::scaled_sum_kernel", *arguments, **NO_GPU)
    assert answer.code != 0
    assert message in answer.err
