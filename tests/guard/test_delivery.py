"""Before a version is delivered, its file is called as the user calls it; a guard that refuses this call fails the version."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mtmc_lsp.codegen.standalone import placed
from mtmc_lsp.core.errors import TargetRaises
from mtmc_lsp.core.results import CheckStatus, Verdict, VerdictStatus
from mtmc_lsp.core.run import Candidate, Placement
from mtmc_lsp.core.workload import Capture, ModuleForm
from mtmc_lsp.guard.worker.observed_calls import guards_of
from mtmc_lsp.measure.local_measurer import LocalMeasurer
from mtmc_lsp.source.compose import compose
from mtmc_lsp.source.sibling.pair import separated
from mtmc_lsp.verify.adapters import kernels_file
from mtmc_lsp.verify.delivery import GUARD_ACCEPTS
from mtmc_lsp.verify.messages import GuardAnswer, GuardRequest
from mtmc_lsp.verify.worker.guard_command import check_guard
from tests.codegen.checker import Checker
from tests.planning.situations import fully_fused, start

TEXT = """
from functools import wraps
from typing import NamedTuple

import torch
from torch import nn


class Rope(NamedTuple):
    cos: torch.Tensor
    sin: torch.Tensor


def logged(function):
    @wraps(function)
    def call(*arguments, **named):
        return function(*arguments, **named)

    return call


# mtmc: x=f32[N,M] N=4096 M=64
def simple(x):
    return torch.tanh(x) * 2


# mtmc: x=f32[N] sizes=[(1,2),(3,4)] N=12
def nested_numbers(x, sizes):
    for a, b in sizes:
        x = x * a + b
    return x


# mtmc: scores=f32[B,H,S] mask=f32[B,H,S]{S,0,1} row=f32[B,H,S]{0,0,1} B=2 H=3 S=20
def expanded(scores, mask, row):
    return torch.softmax(scores + mask * row, -1)


# mtmc: x=f32[N,M]{1,N} N=12 M=8
def transposed(x):
    return torch.relu(x * 2)


# mtmc: windows=f32[W,8]{4,1} W=10
def overlapping(windows):
    return (windows * windows).sum(-1)


# mtmc: x=f32[S,16] rope=Rope(cos=f32[S,16],sin=f32[S,16]) caches=[(f32[S,16],{"gain":f32[16]})] S=8
def in_containers(x, rope, caches):
    return x * rope.cos + rope.sin * caches[0][0] * caches[0][1]["gain"]


# mtmc: x=f32[N] N=20
def passed_on(x, *more, scale=2.0, **named):
    return torch.tanh(x) * scale


# mtmc: x=f32[N] N=20
@logged
@torch.no_grad()
def decorated(x):
    return torch.tanh(x) * 2


# mtmc: x=f32[N] N=20
def undecorated(x):
    return torch.tanh(x) * 2


# mtmc: x=f32[N] device=cpu N=20
def on_the_cpu(x):
    return torch.tanh(x) * 2


# mtmc: module=train x=f32[B,16] B=4
class Trained(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(16), nn.Dropout(0.0)

    def forward(self, x):
        x = torch.tanh(self.drop(self.norm(x)))
        return x + 1 if self.training else x


# mtmc: module=bf16 x=bf16[B,16] B=4
class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return torch.relu(self.linear(x)) * 2
"""
ACCEPTED = (
    "simple", "nested_numbers", "expanded", "transposed", "overlapping", "in_containers", "passed_on", "decorated", "Trained",
    "Half",
)  # fmt: skip
Optimised = Callable[[str, str], tuple[Capture, str]]


def decided(capture: Capture, source: str, *, records_gradients: bool = False) -> GuardAnswer:
    request = GuardRequest(capture.workload, f"delivered{abs(hash(source))}", TEXT, source, records_gradients)
    return check_guard(request)


@pytest.mark.parametrize("name", ACCEPTED)
def test_the_guard_accepts_the_call_of_the_files_own_workload(optimised: Optimised, name: str) -> None:
    assert decided(*optimised(TEXT, name)) == GuardAnswer(stands_in=True)


def in_two_files(checker: Checker, name: str) -> GuardRequest:
    """The call of the workload in the file and the file of kernels beside it."""
    capture = checker.capture(TEXT, name)
    code, target = fully_fused(capture, start(capture, TEXT)).code, capture.workload.target
    assert code is not None
    text = compose(TEXT.encode(), target, placed(code, Placement.SIBLING, TEXT.encode()))
    pair = separated(text, name, Path(target.path), "", None)
    module = f"beside{abs(hash(text))}"
    kernels = kernels_file(Path(target.path), name, pair)
    return GuardRequest(capture.workload, module, TEXT, pair.user.decode(), kernels=kernels)


@pytest.mark.parametrize("name", ACCEPTED)
def test_the_guard_accepts_the_call_in_the_two_files_that_are_delivered(checker: Checker, name: str) -> None:
    request = in_two_files(checker, name)
    assert request.kernels is not None
    assert check_guard(request) == GuardAnswer(stands_in=True)
    without = replace(request.kernels, text=request.kernels.text.replace("_launch", "_lost"))
    with pytest.raises(TargetRaises, match="cannot import name"):
        check_guard(replace(request, kernels=without))


def test_the_mode_of_the_module_is_that_of_the_workload(optimised: Optimised) -> None:
    capture, source = optimised(TEXT, "Trained")
    other = replace(capture, workload=replace(capture.workload, module=ModuleForm(training=False)))
    assert decided(other, source).reason == (
        "self is in evaluation mode; the kernels were made for training mode: call .train() before"
    )


def test_a_call_that_records_gradients_is_refused_unless_a_decorator_turns_them_off(optimised: Optimised) -> None:
    """The call goes through the decorators of the target."""
    assert decided(*optimised(TEXT, "decorated"), records_gradients=True).reason == ""
    assert decided(*optimised(TEXT, "undecorated"), records_gradients=True).reason.startswith(
        "gradients are recorded for x"
    )


def test_a_workload_on_the_cpu_is_refused(optimised: Optimised) -> None:
    answer = decided(*optimised(TEXT, "on_the_cpu"))
    assert (answer.reason, answer.stands_in) == ("x is on the CPU; the kernels run on a GPU", False)


def test_a_file_without_a_guard_is_not_asked(optimised: Optimised) -> None:
    capture, _ = optimised(TEXT, "simple")
    assert not decided(capture, TEXT).has_guard


PLACES = """
import torch


def box_fits(x):
    return False


try:
    import missing
except ImportError:

    class Block(torch.nn.Module):
        def forward(self, x):
            if block_fits(self, x):  # mtmc: dispatch
                return block_launch(x)
            return x if box_fits(x) else x + 1

        def step(self, x):
            if (block_step_tensors := block_step_fits(self, x)) is not None:  # mtmc: dispatch
                return block_step_launch(*block_step_tensors)
            return x


class Smaller(Block):
    def forward(self, x, *, flag=None):  # mtmc: dispatch
        if smaller_fits(self, x):
            return smaller_launch(x)
        return super().forward(x, flag=flag)


def box_fits_twice(x):
    return box_fits(x) and box_fits(x)
"""


def test_only_dispatch_statements_of_the_target_name_guards() -> None:
    """The user's functions may have such names, too."""
    assert guards_of(PLACES, "Block") == guards_of(PLACES, "Block.forward") == ("block_fits",)
    assert guards_of(PLACES, "Block.step") == ("block_step_fits",)
    assert guards_of(PLACES, "Smaller") == guards_of(PLACES, "Smaller.forward") == ("smaller_fits",)
    assert (
        guards_of(PLACES, "box_fits_twice") == guards_of(PLACES, "missing") == guards_of(PLACES, "Block.missing") == ()
    )


def verdict_of(capture: Capture, source: str) -> Verdict:
    measurer = LocalMeasurer(capture, sys.executable, source=TEXT)
    try:
        return measurer.verify(Candidate("1", None, None, source, None, None))
    finally:
        measurer.close()


def delivery_check(verdict: Verdict) -> tuple[CheckStatus, str]:
    (check,) = [check for check in verdict.checks if check.name == GUARD_ACCEPTS]
    return check.status, check.detail


def test_a_version_whose_guard_refuses_the_workload_fails_with_the_condition(optimised: Optimised) -> None:
    capture, source = optimised(TEXT, "simple")
    assert "x.ndim == 2" in source
    verdict = verdict_of(capture, source.replace("x.ndim == 2", "x.ndim == 3"))
    reason = "x has 2 dimensions; the kernels were made for 3"
    assert verdict.status is VerdictStatus.RUNTIME_ERROR
    assert verdict.reason == f"the guard refuses the workload's own call, so no kernel would run: {reason}"
    assert delivery_check(verdict) == (CheckStatus.FAILED, reason)


@pytest.mark.slow
def test_the_sizes_of_the_workload_count_where_the_interpreter_verifies_smaller_ones(optimised: Optimised) -> None:
    capture, source = optimised(TEXT, "simple")
    verdict = verdict_of(capture, source.replace("x.numel() > 0", "x.shape[0] <= 4000"))
    assert delivery_check(verdict) == (
        CheckStatus.FAILED,
        "x.shape[0] is 4096; the kernels need x.shape[0] <= 4000",
    )


@pytest.mark.slow
def test_a_correct_version_passes_and_calls_without_kernels_are_explained(optimised: Optimised) -> None:
    """Verification also passes tensors in an unusual layout, for which the guard chooses the original code."""
    verdict = verdict_of(*optimised(TEXT, "simple"))
    assert verdict.is_correct, verdict.reason
    assert delivery_check(verdict) == (CheckStatus.PASSED, "")
    details = [check.detail for check in verdict.checks if check.name == "kernel launched" and check.detail]
    assert any("no kernel ran, only torch code: x is not contiguous" in detail for detail in details)


@pytest.mark.slow
def test_a_reason_that_only_the_reduced_call_shows_is_named_too(optimised: Optimised) -> None:
    capture, source = optimised(TEXT, "simple")
    verdict = verdict_of(capture, source.replace("x.numel() > 0", "x.shape[0] >= 4000"))
    assert verdict.status is VerdictStatus.RUNTIME_ERROR
    assert "no Triton kernel was launched on the workload's inputs: x.shape[0] is " in verdict.reason
