"""``mtmc why FILE::NAME`` as a user runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from runner import mtmc, project

from mtmc_lsp.capture.recorded_calls import RECORDS, merge_records, store_records

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
FUNCTION = (GOLDEN / "fuse" / "after.py").read_text()
"""``bias_gelu(x, bias)`` with its kernels."""
MODULE = (GOLDEN / "recurrent" / "after.py").read_text()
"""``Net`` with its kernels, and ``get_inputs``."""
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def tensor(name: str, shape: list[int], dtype: str = "float32") -> dict[str, Any]:
    stride = [shape[1], 1] if len(shape) == 2 else [1]
    return {"name": name, "tensor": {"shape": shape, "stride": stride, "dtype": dtype}}


def record(file: Path, *calls: dict[str, Any]) -> None:
    """Store calls of ``bias_gelu`` as ``mtmc record`` does."""
    defaults = {"training": 0, "grad": 0, "compiled": 0, "init": []}
    function = {
        "path": str(file),
        "qualname": "bias_gelu",
        "others": 0,
        "traced": 0,
        "calls": [{**defaults, **c} for c in calls],
    }
    (file.parent / ".mtmc").mkdir()
    store_records(file.parent / ".mtmc" / RECORDS, merge_records([[function]]))


@pytest.mark.parametrize(("text", "name"), [(FUNCTION, "bias_gelu"), (MODULE, "Net")])
def test_kernels_that_run_for_the_files_workload_are_exit_code_0(tmp_path: Path, text: str, name: str) -> None:
    project(tmp_path, text)
    answer = mtmc(tmp_path, "why", f"model.py::{name}", **NO_GPU)
    assert answer.code == 0, answer.err
    assert f"{name}: the kernels run for 1 of 1 known calls" in answer.out
    assert "CPU tensors stood in for those of a GPU" in answer.out


def test_a_refused_workload_is_exit_code_1_with_the_condition(tmp_path: Path) -> None:
    project(tmp_path, FUNCTION.replace("x=f32[M,N]", "x=f16[M,N]"))
    answer = mtmc(tmp_path, "why", "model.py::bias_gelu", **NO_GPU)
    assert answer.code == 1, answer.err
    line = FUNCTION.splitlines().index("# mtmc: x=f32[M,N] bias=f32[N] M=32 N=96") + 1
    assert (
        f"✗ the call of the directive (line {line}): x is float16; the kernels were made for float32\n"
        "    bias_gelu_fits: x.dtype == torch.float32\n"
    ) in answer.out


def test_recorded_calls_are_explained_one_by_one(tmp_path: Path) -> None:
    file = project(tmp_path, FUNCTION)
    record(
        file,
        {"count": 5, "grad": 2, "arguments": [tensor("x", [8, 96]), tensor("bias", [96])]},
        {"count": 3, "arguments": [tensor("x", [8, 96], "bfloat16"), tensor("bias", [96], "bfloat16")]},
        {"count": 9, "arguments": [{"name": "x", "other": "Config"}, tensor("bias", [96])]},
    )
    answer = mtmc(tmp_path, "why", "model.py::bias_gelu", "--json", **NO_GPU)
    assert answer.code == 1, answer.err
    document = answer.document
    assert document["kernels_run"] is False
    assert document["target"]["qualname"] == "bias_gelu"
    calls = [(call["name"], call["count"], call["reason"], call["condition"]) for call in document["calls"]]
    assert calls[1:] == [
        ("3 recorded calls with x=f32[8,96] bias=f32[96]", 3, "", ""),
        (
            "2 recorded calls with x=f32[8,96] bias=f32[96]",
            2,
            "gradients are recorded for x, bias: call it under torch.no_grad() or torch.inference_mode()",
            "not (torch.is_grad_enabled() and any([t.requires_grad for t in tensors]))",
        ),
        (
            "3 recorded calls with x=bf16[8,96] bias=bf16[96]",
            3,
            "x is bfloat16; the kernels were made for float32",
            "x.dtype == torch.float32",
        ),
    ]
    assert (calls[0][2], calls[0][0].startswith("the call of the directive")) == ("", True)


def test_a_change_of_the_code_is_the_reason(tmp_path: Path) -> None:
    project(tmp_path, FUNCTION.replace("F.gelu(x + bias) * 0.5\n", "F.gelu(x + bias) * 0.25\n"))
    answer = mtmc(tmp_path, "why", "model.py::bias_gelu", "--json", **NO_GPU)
    assert answer.code == 1
    (call,) = answer.document["calls"]
    assert call["reason"] == "the code of bias_gelu changed since the kernels were made: run mtmc optimize again"


START = FUNCTION.index("    if bias_gelu_fits")
DISPATCH = FUNCTION[START : FUNCTION.index("    return F.gelu(x + bias) * 0.5\n", START)]


@pytest.mark.parametrize(
    "text",
    [
        pytest.param((GOLDEN / "fuse" / "before.py").read_text(), id="never optimised"),
        pytest.param(FUNCTION.replace(DISPATCH, ""), id="dispatch statement removed"),
    ],
)
def test_a_target_without_kernels_is_exit_code_2_and_told_to_optimize(tmp_path: Path, text: str) -> None:
    project(tmp_path, text)
    answer = mtmc(tmp_path, "why", "model.py::bias_gelu", "--json")
    assert answer.code == 2
    assert "bias_gelu calls no kernels in this file" in answer.error["message"]
    assert answer.error["remedy"] == "Run mtmc optimize model.py::bias_gelu --apply."


def test_a_call_that_raises_is_exit_code_2_with_its_line(tmp_path: Path) -> None:
    text = MODULE.replace("    return [", '    raise ValueError("no inputs")\n    return [', 1)
    assert text != MODULE
    project(tmp_path, text)
    answer = mtmc(tmp_path, "why", "model.py::Net", "--json", **NO_GPU)
    assert answer.code == 2
    assert "Net raises ValueError on the workload's inputs: no inputs" in answer.error["message"]


def test_an_interpreter_without_torch_is_exit_code_3(tmp_path: Path) -> None:
    project(tmp_path, FUNCTION)
    answer = mtmc(tmp_path, "why", "model.py::bias_gelu", "--python", "/bin/false")
    assert answer.code == 3
