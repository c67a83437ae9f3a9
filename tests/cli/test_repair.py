"""``mtmc repair`` and ``mtmc profile`` of a kernel that is already in a file, as a user runs them."""

from __future__ import annotations

from pathlib import Path

import pytest
from runner import mtmc, project

from benchmarks.kernel_faults.kernels import source

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
SOUND = source("add").replace(" reference=add_reference", "")
FAULTY = SOUND.replace("tl.load(y_ptr + offsets, mask=mask)", "tl.load(y_ptr + offsets)  # the second operand")
LINE = next(i for i, row in enumerate(FAULTY.splitlines(), 1) if "# the second operand" in row)


def test_a_fault_is_shown_with_its_line_and_smallest_case_and_the_file_stays(tmp_path: Path) -> None:
    file = project(tmp_path, FAULTY)
    answer = mtmc(tmp_path, "repair", "model.py::add_kernel", **NO_GPU)
    assert answer.code == 1, answer.err
    assert "add (add_kernel): repaired by 1 edit" in answer.out
    assert f"line {LINE}, add_kernel: it reads element 1023 of y_ptr, which has 1" in answer.out
    assert "the smallest case: N=1" in answer.out
    assert "-    y = tl.load(y_ptr + offsets)  # the second operand" in answer.out
    assert "+    y = tl.load(y_ptr + offsets, mask=mask, other=0.0)  # the second operand" in answer.out
    assert "no reference is named" in answer.out
    assert file.read_text() == FAULTY


def test_apply_writes_the_repair_and_keeps_the_text_before(tmp_path: Path) -> None:
    file = project(tmp_path, FAULTY)
    answer = mtmc(tmp_path, "repair", "model.py::add", "--apply", "--json", **NO_GPU)
    assert answer.code == 0, answer.err
    document = answer.document
    assert document["repaired"] and not document["sound"]
    assert document["failing"]["faults"][0]["line"] == LINE
    assert file.read_text() == FAULTY.replace("y_ptr + offsets)", "y_ptr + offsets, mask=mask, other=0.0)")
    assert Path(document["backup"]).read_text() == FAULTY
    again = mtmc(tmp_path, "repair", "model.py::add", **NO_GPU)
    assert again.code == 0, again.out
    assert "add (add_kernel): no fault" in again.out
    undone = mtmc(tmp_path, "undo", document["run"])
    assert undone.code == 0, undone.err
    assert file.read_text() == FAULTY


@pytest.mark.slow
def test_a_repair_is_verified_against_the_reference(tmp_path: Path) -> None:
    text = source("softmax").replace('-float("inf")', "0.0")
    project(tmp_path, text)
    answer = mtmc(tmp_path, "repair", "model.py::softmax", **NO_GPU)
    assert answer.code == 1, answer.err
    assert 'Fill the lanes outside the mask with float("-inf") instead of 0.0' in answer.out
    assert "compared with softmax_reference: correct" in answer.out


@pytest.mark.slow
def test_a_fault_that_no_edit_repairs_leaves_the_file_and_is_exit_code_1(tmp_path: Path) -> None:
    text = source("softmax").replace(
        "e = tl.exp(x - tl.max(x, axis=0))", "e = tl.exp(x - tl.max(x, axis=0)) + 0.25 * x * x"
    )
    file = project(tmp_path, text)
    answer = mtmc(tmp_path, "repair", "model.py::softmax", "--apply", "--seconds", "20", **NO_GPU)
    assert answer.code == 1, answer.err
    assert "faulty, and no repair was verified" in answer.out
    assert "a result has a relative error of" in answer.out
    assert file.read_text() == text


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        (
            SOUND.replace("def add(x", "def add(x").replace("add_kernel[grid]", "other[grid]"),
            "add_kernel",
            "model.py:7: no function of the file launches add_kernel\n"
            "  Write a function that launches it, with a directive such as # mtmc: x=f32[M,N] M=64 N=1024,\n"
            "  or record its launches: mtmc record -- python your_program.py\n",
        ),
        (
            source("add").replace("reference=add_reference", "reference=nothing"),
            "add",
            "model.py:21: the directive names the reference nothing, which the file does not define\n"
            "  Name a PyTorch function of the same file: # mtmc: reference=NAME.\n",
        ),
        (
            SOUND.replace("# mtmc: x=f32[N] y=f32[N] N=98432", "# mtmc: x=f32[3000000] y=f32[3000000]"),
            "add",
            "model.py:20: the sizes of the workload are too large for Triton's interpreter\n"
            "  Name the sizes, as in x=f32[M,N] M=4096 N=4096, so that smaller ones can be tried.\n",
        ),
        (
            SOUND + "\n\nclass Net(torch.nn.Module):\n    def forward(self, x):\n        return x\n",
            "Net",
            "model.py:29: Net is no kernel and no function\n"
            "  Name a @triton.jit kernel, or the function that launches it.\n",
        ),
    ],
)
def test_bad_input_is_one_error_with_its_remedy(tmp_path: Path, text: str, name: str, message: str) -> None:
    project(tmp_path, text)
    answer = mtmc(tmp_path, "repair", f"model.py::{name}", **NO_GPU)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err == f"error: {message}"


def test_a_kernel_is_profiled_at_the_sizes_of_its_workload(tmp_path: Path) -> None:
    project(tmp_path, SOUND, '[tool.mtmc]\narchs = ["sm_90"]\n')
    answer = mtmc(tmp_path, "profile", "model.py::add_kernel", **NO_GPU)
    assert answer.code == 0, answer.err
    assert "add_kernel, launched by add with N=98432" in answer.out
    assert "1.18 MB accessed and 99.3 kFLOP" in answer.out
    rows = [row.split() for row in answer.out.splitlines() if " yes " in row]
    assert [row[:4] for row in rows] == [
        ["11", "load", "x_ptr", "contiguous"],
        ["12", "load", "y_ptr", "contiguous"],
        ["13", "store", "out_ptr", "contiguous"],
    ]
    assert "sm_90: " in answer.out and "registers, 0 bytes spilled" in answer.out


def test_a_kernel_whose_constants_the_file_does_not_tell_is_compiled_with_usual_values(tmp_path: Path) -> None:
    kernel = SOUND[: SOUND.index("# mtmc:")]
    project(tmp_path, kernel, '[tool.mtmc]\narchs = ["sm_90"]\n')
    answer = mtmc(tmp_path, "profile", "model.py::add_kernel", **NO_GPU)
    assert answer.code == 0, answer.err
    assert "compiled with usual values: BLOCK_SIZE=64\n" in answer.out
    assert "sm_90: " in answer.out and "registers, 0 bytes spilled" in answer.out
    launcher = "def add(x, y):\n    add_kernel[(1,)](x, y, x, x.numel(), BLOCK_SIZE=256)\n"
    (tmp_path / "model.py").write_text(f"{kernel}{launcher}")
    assert "usual values" not in mtmc(tmp_path, "profile", "model.py::add_kernel", **NO_GPU).out


@pytest.mark.gpu
def test_kernels_are_observed_by_the_interpreter_on_a_machine_with_a_gpu(tmp_path: Path) -> None:
    """``tl.max`` of the kernel is a function that Triton compiles or interprets from its import on."""
    project(tmp_path, source("softmax"))
    answer = mtmc(tmp_path, "repair", "model.py::softmax")
    assert answer.code == 0, answer.out + answer.err
    assert "softmax (softmax_kernel): no fault" in answer.out
