"""How often a version calls the user's code where its guard refuses, if that code is a long loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mtmc_lsp.core.workload import Capture
from mtmc_lsp.verify.cases import Case
from mtmc_lsp.verify.messages import CallPlan, CandidateSource, CaseRequest
from mtmc_lsp.verify.worker import reference_commands
from mtmc_lsp.verify.worker.callers import load_candidate
from mtmc_lsp.verify.worker.candidate_commands import _Calls
from mtmc_lsp.verify.worker.observation.threads import ThreadWatch

SERIES = """
import torch


# mtmc: x=f32[B,T] B=4 T=600
def series(x):
    h = torch.zeros_like(x[:, 0])
    out = torch.zeros_like(x)
    for t in range(x.shape[1]):
        h = 0.5 * h + torch.tanh(x[:, t])
        out[:, t] = h
    return out
"""
DISPATCH = """    if series_fits(x):  # mtmc: dispatch
        return series_triton(x)
"""
VERSION = """

CALLS = []


def series_fits(x):
    return x.shape[0] <= 4


def series_triton(x):
    CALLS.append("version")
    return x.clone()
"""


def calls_of(capture: Capture, plan: CallPlan, **sizes: int) -> tuple[list[str], dict[str, Any]]:
    """The calls on a case, and what was observed."""
    text = SERIES.replace("def series(x):\n", "def series(x):\n" + DISPATCH + '    CALLS.append("user")\n') + VERSION
    case = Case({**capture.graph.sizes, **sizes}, "normal", 3)
    data = CaseRequest(capture, user_source=SERIES, case=case, inputs="")
    inputs = reference_commands.inputs_of(data)[1]
    source = CandidateSource(text)
    module, prepare = load_candidate(source, data)
    module.CALLS.clear()
    calls = _Calls(module, prepare, lambda: prepare, capture, case, "cpu", inputs, source, ThreadWatch())
    return module.CALLS, calls.run(plan)[1]


PLAN = CallPlan(changes_contents=True, repeats=24)


@pytest.fixture
def capture(captured: Callable[[str, str], Capture]) -> Capture:
    return captured(SERIES, "series")


def test_where_the_guard_refuses_a_long_loop_it_runs_once(capture: Capture) -> None:
    calls, observed = calls_of(capture, PLAN, B=5)
    assert calls == ["user"] and observed["differing"] is None
    assert observed["refusal"]


def test_a_short_loop_and_a_call_that_the_guard_accepts_are_repeated(capture: Capture) -> None:
    assert calls_of(capture, PLAN, B=5, T=100)[0] == ["user"] * 26
    calls, observed = calls_of(capture, PLAN)
    assert calls == ["version"] * 26 and observed["differing"] == ()


def test_the_workload_itself_is_called_as_planned(capture: Capture) -> None:
    assert calls_of(capture, replace(PLAN, disables_kernels=True), B=5)[0] == ["user"] * 26
