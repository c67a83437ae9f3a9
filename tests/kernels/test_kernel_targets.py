"""Which launcher, workload and reference a name stands for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.kernel_faults.kernels import source
from mtmc_lsp.app.kernels.opening import KernelTarget, open_kernel
from mtmc_lsp.app.target_file import open_target, parse_request
from mtmc_lsp.core.errors import NoWorkload, RequestError
from mtmc_lsp.kernels.sizes import MOST_ELEMENTS, elements_of, trace_cases
from mtmc_lsp.source.targets import find_target
from mtmc_lsp.source.workload.directive import parse_directive, reference_name

SOFTMAX = source("softmax")


def opened(folder: Path, text: str, name: str) -> KernelTarget:
    file = folder / "model.py"
    file.write_text(text)
    return open_kernel(open_target(parse_request(f"{file}::{name}", python=sys.executable)))


@pytest.mark.parametrize("name", ["softmax", "softmax_kernel"])
def test_a_kernel_and_its_launcher_stand_for_the_same(tmp_path: Path, name: str) -> None:
    target = opened(tmp_path, SOFTMAX, name)
    assert target.launcher.qualname == "softmax"
    assert dict(target.workload.sizes) == {"M": 1823, "N": 781}
    assert target.reference is not None
    assert target.reference.target.qualname == "softmax_reference"


def test_the_reference_may_have_the_example_inputs(tmp_path: Path) -> None:
    text = SOFTMAX.replace(
        "# mtmc: x=f32[M,N] M=1823 N=781 reference=softmax_reference", "# mtmc: reference=softmax_reference"
    )
    text = text.replace("def softmax_reference(x)", "# mtmc: values=f32[A,B] A=12 B=34\ndef softmax_reference(values)")
    target = opened(tmp_path, text.replace("torch.softmax(x,", "torch.softmax(values,"), "softmax")
    assert dict(target.workload.sizes) == {"A": 12, "B": 34}
    assert list(target.workload.tensors) == ["x"], "by position"
    assert target.reference is not None
    assert list(target.reference.tensors) == ["values"]


def test_the_reference_may_be_named_above_the_kernel(tmp_path: Path) -> None:
    text = SOFTMAX.replace(" reference=softmax_reference", "")
    text = text.replace("@triton.jit", "# mtmc: reference=softmax_reference\n@triton.jit")
    assert opened(tmp_path, text, "softmax_kernel").reference is not None


def test_a_reference_with_fewer_parameters_is_refused(tmp_path: Path) -> None:
    text = SOFTMAX.replace("def softmax_reference(x)", "def softmax_reference()")
    with pytest.raises(RequestError, match="softmax_reference takes 0 arguments, and softmax takes 1"):
        opened(tmp_path, text, "softmax")


def test_without_example_inputs_the_error_contains_a_directive(tmp_path: Path) -> None:
    text = "\n".join(line for line in SOFTMAX.splitlines() if "mtmc:" not in line)
    with pytest.raises(NoWorkload) as caught:
        opened(tmp_path, text, "softmax_kernel")
    assert "# mtmc: x=f32" in caught.value.remedy


def test_a_parameter_called_reference_stays_an_argument() -> None:
    text = b"# mtmc: x=f32[N] reference=f32[N] N=8\ndef f(x, reference):\n    return x - reference\n"
    target = find_target(text, "model.py", "f")
    workload = parse_directive(text, target, "model.py")
    assert workload is not None
    assert list(workload.tensors) == ["x", "reference"]
    assert reference_name(text, target, "model.py") == ""


def test_cases_are_small_and_have_sizes_on_both_sides_of_blocks(tmp_path: Path) -> None:
    target = opened(tmp_path, source("matmul"), "matmul")
    cases = trace_cases(target.workload, source("matmul"))
    assert all(elements_of(target.workload, case.sizes) <= 2 * MOST_ELEMENTS for case in cases)
    for name in "MNK":
        sizes = {case.sizes[name] for case in cases}
        assert {1, 16, 17, 32, 33, 47} <= sizes, name
    assert {case.distribution for case in cases} == {"normal", "negative", "positive"}
    assert [elements_of(target.workload, case.sizes) for case in cases] == sorted(
        elements_of(target.workload, case.sizes) for case in cases
    )
