"""Candidates that are right in one call and wrong in use are refused, each by the step that it is about."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pairs import changed
from uses import (
    EVALUATED,
    EVALUATED_NEW,
    FAST,
    MODEL,
    MODEL_NEW,
    OF_FUNCTIONS,
    OF_MODULES,
    RANDOM,
    RANDOM_NEW,
    RMS,
    when,
)

from mtmc_lsp.core.results import CheckStatus, VerdictStatus
from mtmc_lsp.source.targets import find_target
from mtmc_lsp.verify.adapters import ForeignCandidate
from mtmc_lsp.verify.candidate_process import CandidateProcess
from mtmc_lsp.verify.outcomes import CaseOutcome
from mtmc_lsp.verify.use.check import use_case, used_outcome
from tests.verify.conftest import PairJudge

Use = Callable[[str, str, str, str], CaseOutcome]


@pytest.fixture
def use(judge: PairJudge, fork_server, tmp_path: Path) -> Iterator[Use]:
    """Runs the use script alone, on a candidate's text."""
    processes: list[CandidateProcess] = []

    def run(text: str, name: str, candidate: str, its_name: str) -> CaseOutcome:
        reference = judge.reference(text, name, 60.0)
        file = tmp_path / "fast_module.py"
        file.write_text(candidate)
        target = find_target(candidate.encode(), str(file), its_name)
        foreign = ForeignCandidate(reference.capture, target, candidate)
        trial = foreign.trials(reference.constructor(), interpreted=True)[0]
        cases = foreign.cases(trial, interpreted=True, seed=5)
        process = CandidateProcess(
            sys.executable, str(tmp_path), reference.capture.environment, has_gpu=False, fork_server=fork_server
        )
        processes.append(process)
        return used_outcome(foreign, reference, process, trial, use_case(cases, trial.capture, 7))

    yield run
    for process in processes:
        process.close()


def steps(outcome: CaseOutcome, status: CheckStatus) -> set[str]:
    """The steps with this status."""
    return {check.name.removeprefix("use: ") for check in outcome.checks if check.status is status}


@pytest.mark.parametrize("what", OF_MODULES)
def test_a_module_that_is_wrong_in_one_use_fails_this_use_and_no_other(what: str, use: Use) -> None:
    changes, failing = OF_MODULES[what]
    outcome = use(MODEL, "Model", changed(MODEL_NEW, *changes), "ModelNew")
    failed = steps(outcome, CheckStatus.FAILED)
    # Nearly all steps call the instance.
    assert failed >= failing if failing == {"call"} else failed == failing, outcome


@pytest.mark.parametrize("what", OF_FUNCTIONS)
def test_a_function_that_is_wrong_in_one_use_fails_this_use_and_no_other(what: str, use: Use) -> None:
    changes, failing = OF_FUNCTIONS[what]
    outcome = use(RMS, "rms", changed(FAST, *changes), "fast")
    assert steps(outcome, CheckStatus.FAILED) == failing, outcome


def test_a_module_that_ignores_training_mode_is_refused(use: Use) -> None:
    outcome = use(EVALUATED, "Model", changed(EVALUATED_NEW, when("self.training")), "ModelNew")
    assert steps(outcome, CheckStatus.FAILED) == {"train", "trained"}, outcome


@pytest.mark.parametrize(
    "other", ["torch.ones(width)", "torch.randn(width)", "torch.randn(width) * 0.2 + 0.5", "torch.zeros(width)"]
)
def test_a_module_with_other_random_initial_values_is_refused(other: str, use: Use) -> None:
    outcome = use(RANDOM, "Model", changed(RANDOM_NEW, ("torch.randn(width) * 0.2", other)), "ModelNew")
    assert steps(outcome, CheckStatus.FAILED) == {"initial"}, outcome


def test_a_module_that_draws_its_initial_values_in_another_order_is_accepted(use: Use) -> None:
    drawn = "        super().__init__()\n        torch.rand(3)\n"
    outcome = use(RANDOM, "Model", changed(RANDOM_NEW, ("        super().__init__()\n", drawn)), "ModelNew")
    assert outcome.status is VerdictStatus.CORRECT, outcome
    assert "initial" in steps(outcome, CheckStatus.PASSED)


def test_a_candidate_with_the_reference_s_name_must_take_its_arguments_by_name(use: Use) -> None:
    same_name = FAST.replace("def fast(", "def rms(")
    other = changed(same_name, ("def rms(x, w, eps=1e-5):\n", "def rms(data, w, eps=1e-5):\n    x = data\n"))
    assert steps(use(RMS, "rms", same_name, "rms"), CheckStatus.PASSED) >= {"keywords"}
    assert steps(use(RMS, "rms", other, "rms"), CheckStatus.FAILED) == {"keywords"}
    renamed = other.replace("def rms(", "def fast(")
    assert use(RMS, "rms", renamed, "fast").status is VerdictStatus.CORRECT


@pytest.mark.parametrize(
    ("text", "candidate"), [(MODEL, MODEL_NEW), (EVALUATED, EVALUATED_NEW)], ids=["get_inputs", "directive"]
)
def test_an_honest_module_passes_all_steps_and_skips_none(text: str, candidate: str, use: Use) -> None:
    outcome = use(text, "Model", candidate, "ModelNew")
    assert outcome.status is VerdictStatus.CORRECT, outcome
    all_steps = {step for _, failing in OF_MODULES.values() for step in failing}
    assert all_steps | {"train"} <= steps(outcome, CheckStatus.PASSED)


def test_an_honest_function_passes_all_steps_and_skips_none(use: Use) -> None:
    outcome = use(RMS, "rms", FAST, "fast")
    assert outcome.status is VerdictStatus.CORRECT, outcome
    assert {step for _, failing in OF_FUNCTIONS.values() for step in failing} <= steps(outcome, CheckStatus.PASSED)


def test_the_message_names_the_parameters_whose_earlier_values_decide(use: Use) -> None:
    changes, _ = OF_MODULES["a packed parameter is kept until it is another object"]
    outcome = use(MODEL, "Model", changed(MODEL_NEW, *changes), "ModelNew")
    assert outcome.reason == "use: after load_state_dict the result is still that of the earlier values (gain)"


GROUPED = """import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, groups, power: int = 2):
        super().__init__()
        self.groups, self.power = groups, power

    def forward(self, x):
        parts = x.view(x.shape[0], self.groups, -1)
        return (parts.abs() ** self.power).sum(1)


def get_inputs():
    return [torch.rand(8, 32)]


def get_init_inputs():
    return [4]
"""
GROUPED_NEW = """import torch
import triton
import triton.language as tl
from torch import nn


@triton.jit
def summed(x_ptr, out_ptr, width, GROUPS: tl.constexpr, POWER: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    mask = at < width
    row = tl.program_id(0)
    total = tl.zeros((BLOCK,), tl.float32)
    for group in range(GROUPS):
        x = tl.abs(tl.load(x_ptr + (row * GROUPS + group) * width + at, mask=mask, other=0.0))
        term = x
        for _ in range(POWER - 1):
            term = term * x
        total += term
    tl.store(out_ptr + row * width + at, total, mask=mask)


class ModelNew(nn.Module):
    def __init__(self, groups, power: int = 2):
        super().__init__()
        self.groups, self.power = groups, power

    def forward(self, x):
        x, groups, power = x.contiguous(), self.groups, self.power
        width = x.shape[1] // groups
        out = torch.empty(x.shape[0], width, dtype=x.dtype, device=x.device)
        if out.numel():
            summed[(x.shape[0],)](x, out, width, groups, power, BLOCK=triton.next_power_of_2(width))
        return out
"""
READ = "self.groups, self.power\n        width"
OPTIONS = {
    "the power": ("self.groups, 2\n        width", {"constructor power=3", "constructor power=4"}),
    "the groups": ("4, self.power\n        width", {"constructor groups=8"}),
}
"""Numbers that a kernel is written for; 32 columns have no 5 groups."""


@pytest.mark.parametrize("what", OPTIONS)
def test_a_module_that_ignores_a_whole_number_of_its_constructor_is_refused(what: str, use: Use) -> None:
    text, failing = OPTIONS[what]
    outcome = use(GROUPED, "Model", changed(GROUPED_NEW, (READ, text)), "ModelNew")
    assert steps(outcome, CheckStatus.FAILED) == failing, outcome


@pytest.mark.parametrize("checked", ["", "        assert groups == 4 and power == 2\n"], ids=["follows", "refuses"])
def test_a_module_that_follows_such_a_number_or_refuses_others_is_accepted(checked: str, use: Use) -> None:
    text = changed(GROUPED_NEW, ("        super().__init__()\n", f"{checked}        super().__init__()\n"))
    outcome = use(GROUPED, "Model", text, "ModelNew")
    assert outcome.status is VerdictStatus.CORRECT, outcome
    assert ("constructor power=3" in steps(outcome, CheckStatus.PASSED)) is not bool(checked)


def test_the_default_of_a_whole_number_must_be_the_same(use: Use) -> None:
    outcome = use(GROUPED, "Model", changed(GROUPED_NEW, ("power: int = 2", "power: int = 3")), "ModelNew")
    assert "constructor_default power" in steps(outcome, CheckStatus.FAILED), outcome
