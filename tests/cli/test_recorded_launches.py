"""``mtmc record`` notes launches of kernels; they are the workload of kernels that have no other one."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from runner import mtmc, project

from mtmc_lsp.capture.recorded_launches import merge_launches
from mtmc_lsp.capture.recorder.arguments import argument_record, update_range
from mtmc_lsp.capture.recorder.launches import LaunchNotes
from tests.kernels.scaled_sum import KERNEL
from tests.versions import OLDEST_TRITON

INTERPRETED = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
FILE = (
    KERNEL
    + '''

@triton.autotune(configs=[triton.Config({"BLOCK": 32}, num_warps=2)], key=["n"])
@triton.jit
def halve_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    tl.store(out_ptr + offsets, 0.5 * x, mask=offsets < n)


@triton.jit
def cast_kernel(x_ptr, out_ptr, TYPE: tl.constexpr):
    tl.store(out_ptr, tl.load(x_ptr).to(TYPE))


class ScaledSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        """The launch is in a method, which is no target."""
        out = torch.empty_like(scale)
        scaled_sum_kernel[(x.shape[0],)](x, scale, out, x.shape[1], BLOCK=64)
        halve_kernel[lambda meta: (triton.cdiv(out.numel(), meta["BLOCK"]),)](out, out, out.numel())
        return out


class Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = x.half()
        cast_kernel[(1,)](x, out, TYPE=tl.float16)
        return out
'''
)
PROGRAM = """\
import torch
from model import Cast, ScaledSum

for _ in range(3):
    ScaledSum.apply(torch.randn(40, 300), torch.randn(40, requires_grad=True))
ScaledSum.apply(torch.randn(4, 70), torch.randn(4))
Cast.apply(torch.randn(1))
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A recorded program: its folder, and its kernels by name."""
    folder = tmp_path_factory.mktemp("launches")
    project(folder, FILE)
    (folder / "program.py").write_text(PROGRAM)
    answer = mtmc(folder, "record", "--json", "--", sys.executable, "program.py", **INTERPRETED)
    if OLDEST_TRITON and "only 0-dimensional arrays" in answer.err:
        pytest.skip("the interpreter of Triton 3.6 cannot run loops with NumPy 2.4")
    assert answer.code == 0, answer.err
    assert "scaled_sum_kernel" in answer.err
    assert "grid=40 x_ptr=f32[40,300] scale_ptr=f32[40]" in answer.err
    return folder, {kernel["qualname"]: kernel for kernel in answer.document["kernels"]}


def test_the_most_frequent_launch_comes_first_with_its_grid_and_arguments(
    recorded: tuple[Path, dict[str, Any]],
) -> None:
    launches = recorded[1]["scaled_sum_kernel"]["launches"]
    assert [launch["count"] for launch in launches] == [3, 1]
    assert [launch["grid"]["grid"] for launch in launches] == [[40], [4]]
    arguments = {item["name"]: item for item in launches[0]["arguments"]}
    assert arguments["x_ptr"]["tensor"]["shape"] == [40, 300]
    assert not arguments["scale_ptr"]["tensor"]["requires_grad"], "a launch records no gradient"
    assert (arguments["N"]["constant"], arguments["BLOCK"]["constant"]) == (300, 64)


def test_an_autotuned_launch_has_the_chosen_configuration_and_the_grid_as_numbers(
    recorded: tuple[Path, dict[str, Any]],
) -> None:
    launch = recorded[1]["halve_kernel"]["launches"][0]
    assert (launch["grid"]["grid"], launch["grid"]["is_tuned"]) == ([2], True)
    assert launch["grid"]["options"]["num_warps"] == 2
    assert launch["grid"]["shared"] == {"out_ptr": "x_ptr"}, "it works in place"
    assert {item["name"]: item["constant"] for item in launch["arguments"]}["BLOCK"] == 32


def test_a_kernel_without_another_workload_is_optimised_on_its_launches(recorded: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = recorded
    answer = mtmc(folder, "optimize", "model.py::scaled_sum_kernel", **NO_GPU)
    assert answer.code == 0, answer.err
    assert "Load scale_ptr once above the loop in scaled_sum_kernel" in answer.out
    assert "the arguments and the grid are those of 3 of the 4 recorded launches" in answer.out
    assert mtmc(folder, "apply").code == 0
    text = (folder / "model.py").read_text()
    assert "scaled_sum_kernel[(x.shape[0],)](x, scale, out, x.shape[1], BLOCK=64)" in text, "launches stay as they are"


def test_a_kernel_that_works_in_place_and_is_tuned_is_observed(recorded: tuple[Path, dict[str, Any]]) -> None:
    answer = mtmc(recorded[0], "profile", "model.py::halve_kernel", **NO_GPU)
    assert answer.code == 0, answer.err
    assert "grid 2 x 1 x 1" in answer.out


def test_launches_that_cannot_be_repeated_are_refused_with_the_argument(recorded: tuple[Path, dict[str, Any]]) -> None:
    answer = mtmc(recorded[0], "optimize", "model.py::cast_kernel", **NO_GPU)
    assert answer.code == 2
    assert "none of the 1 recorded launches of cast_kernel can be repeated: argument 'TYPE' was a dtype" in answer.err
    assert "# mtmc: x=f32[M,N]" in answer.err


@dataclass(repr=False)
class Descriptor:
    """Like a tensor descriptor of Triton; its text would read the elements of its tensor."""

    base: torch.Tensor

    def __repr__(self) -> str:
        raise AssertionError("the elements of a tensor were read")


def noted(*calls: tuple[Any, ...]) -> list[dict[str, Any]]:
    """The records of launches of one kernel, in one process."""

    def kernel(values: Any) -> None:
        """The kernel."""

    notes = LaunchNotes(argument_record, update_range)
    for arguments in calls:
        values = {"self": SimpleNamespace(fn=kernel), "grid": (4,), "args": arguments, "kwargs": {}}
        notes.note(cast("FrameType", SimpleNamespace(f_locals=values, f_back=None)), "model.py", torch)
    return notes.to_json()


def test_launches_with_descriptors_differ_by_the_shapes_of_their_tensors() -> None:
    calls = [(Descriptor(torch.ones(4)),), (Descriptor(torch.zeros(4)),), (Descriptor(torch.ones(5)),)]
    assert [launch["count"] for launch in noted(*calls)[0]["launches"]] == [2, 1]


def test_launches_of_several_processes_with_other_tuples_stay_apart() -> None:
    """A tuple of another length is another launch, in one process and in several."""
    one, two = torch.ones(4), torch.ones(8)
    (kernel,) = merge_launches([noted(((one, two),), ((one, 3),)), noted(((one,),), ((one, two),))])
    assert sorted(launch.count for launch in kernel.launches) == [1, 1, 2]
