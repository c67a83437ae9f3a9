"""What is timed for a target with a backward pass: both passes, and their results are compared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from clocks import SleepClock

from mtmc_lsp.core.errors import MeasurementRejected
from mtmc_lsp.core.results import Timing
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.timing.messages import TimeRequest
from mtmc_lsp.timing.worker import timing_commands as in_timer
from tests.codegen.checker import Checker
from tests.training.targets import HEAD, MODULES, text_of

FUNCTION = """# mtmc: x=f32[B,D] w=f32[D] B=16 D=96 grad=x,w
def f(x, w):
    return torch.sin(x) * w
"""
OWN = """class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return torch.sin(x) * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        {body}
        return {gradients}


def f(x, w):
    return Slow.apply(x, w)
"""
RIGHT = "g * w * torch.cos(x), (g * torch.sin(x)).sum(0)"


@pytest.fixture(autouse=True)
def timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A timing worker's state for each test."""
    SleepClock().install(monkeypatch)
    monkeypatch.setattr(torch, "compile", lambda function, *, mode: function)


def timed(capture: Capture, source: str) -> Timing:
    more: dict[str, Any] = {"baselines": ("compile",), "bound_us": 1.0, "least_us": 0.0, "seconds": 0.0}
    return in_timer.time_candidate(TimeRequest(capture, text_of(capture), source, **more)).timing


def test_the_backward_pass_is_a_part_of_each_timed_call(checker: Checker) -> None:
    capture = checker.capture(HEAD + FUNCTION)
    slow = HEAD + OWN.format(body="__import__('time').sleep(0.003)", gradients=RIGHT)
    timing = timed(capture, slow)
    assert timing.median_us > 3000
    assert timing.against("eager").high < 0.5
    assert [baseline.name for baseline in timing.baselines] == ["eager", "compile"]


def test_a_version_with_another_gradient_is_rejected_before_it_is_timed(checker: Checker) -> None:
    capture = checker.capture(HEAD + FUNCTION)
    wrong = HEAD + OWN.format(body="pass", gradients=RIGHT.replace(".sum(0)", ".mean(0)"))
    with pytest.raises(MeasurementRejected, match="before timing"):
        timed(capture, wrong)


def test_parameters_of_a_module_are_trained_in_each_timed_call(checker: Checker) -> None:
    capture = checker.capture(HEAD + MODULES["perceptron"])
    slow = text_of(capture).replace(
        "return x + self.down",
        "x.register_hook(lambda g: __import__('time').sleep(0.003))\n        return x + self.down",
    )
    assert timed(capture, slow).median_us > 3000
