"""Losses as user code: both passes run as kernels, with the gradients of the user's code."""

from __future__ import annotations

import pytest

from tests.codegen.checker import Checker
from tests.training.rl_losses import LOSSES
from tests.training.targets import HEAD, cases, planned

SLOW = {"clip", "dpo", "ppo", "dice"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in LOSSES]
)
def test_results_and_gradients_are_those_of_the_users_code(checker: Checker, name: str) -> None:
    capture = checker.capture(HEAD + LOSSES[name])
    assert capture.graph.backward is not None, capture.workload.assumed
    candidate = planned(capture)
    assert "torch.autograd.Function" in candidate.source
    assert checker.first_failure(capture, candidate, cases(capture)) == ""
