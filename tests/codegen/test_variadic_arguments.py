"""Targets with *args and **kwargs in calls without further arguments; others are in test_argument_containers."""

from __future__ import annotations

from tests.codegen.harness import verified
from tests.planning.situations import fully_fused, start

FURTHER = """import torch
# mtmc: x=f32[M,N] grad=f32[N] M=6 N=20
def f(x, grad, *more, scale=2.0, **named):
    for other in more:
        x = x + other
    return torch.softmax(x * grad, -1) * scale + named.get("shift", 0.0)
"""


def test_without_further_arguments_the_kernel_runs(captured) -> None:
    capture = captured(FURTHER, "f")
    candidate = fully_fused(capture, start(capture, FURTHER))
    assert "def f_fits(x, grad, more, scale, named) -> bool:" in candidate.source
    assert "not (f_up_to_date() and not more and not named)" in candidate.source
    assert verified(capture, candidate).reason == ""
