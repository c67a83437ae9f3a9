"""A loss of one number over products in bfloat16: the reference's error is mostly chance, so the limit needs draws."""

from __future__ import annotations

import itertools

import pytest
import torch
from wide import Function, compared, expected

from mtmc_lsp.core.dtypes import EPSILON
from mtmc_lsp.verify.error_limits import Draws
from mtmc_lsp.verify.worker.oracle_runs import limits

ROWS, DEPTH, CLASSES = 512, 96, 40


def inputs(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, DEPTH, generator=generator).to(torch.bfloat16)
    weight = (torch.randn(CLASSES, DEPTH, generator=generator) * 0.1).to(torch.bfloat16)
    return {"x": x, "weight": weight, "target": torch.randint(0, CLASSES, (ROWS,), generator=generator)}


def of_logits(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return -torch.log_softmax(logits.float(), -1).gather(-1, target[:, None]).mean()


def loss(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return of_logits(x @ weight.T, target)


def honest(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The products are rounded to bfloat16 after a sum in two parts, so some round to the other neighbour."""
    half = DEPTH // 2
    parts = (x[:, :half] @ weight[:, :half].T).float() + (x[:, half:] @ weight[:, half:].T).float()
    return of_logits(parts.to(torch.bfloat16), target)


def in_float32(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """More precise than the reference: the products are not rounded."""
    return of_logits(x.float() @ weight.float().T, target)


def scaled(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return loss(x, weight, target) * 1.01


def without_a_class(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    logits = (x @ weight.T).float()
    return (logits[:, :-1].logsumexp(-1) - logits.gather(-1, target[:, None])[:, 0]).mean()


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the inputs count as large."""
    monkeypatch.setattr(limits, "SMALL", 100)


def by_chance() -> dict[str, torch.Tensor]:
    """Inputs on which the rounding errors of the reference cancel."""
    for seed in itertools.count():
        values = inputs(seed)
        wide = -torch.log_softmax(values["x"].double() @ values["weight"].double().T, -1)
        exact = wide.gather(-1, values["target"][:, None]).mean()
        if abs(loss(**values).double() / exact - 1) < 4 * EPSILON["float32"]:
            return values
    raise AssertionError


def exact_runs(function: Function, wanted: Draws, monkeypatch: pytest.MonkeyPatch) -> int:
    """The number of float64 runs."""
    runs = 0

    def counting(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        nonlocal runs
        result = function(x, weight, target)
        runs += result.element_size() == 8
        return result

    expected(counting, inputs(0), monkeypatch, wanted=wanted)
    return runs


def test_draws_run_the_code_three_times_more_where_it_rounds_coarsely(monkeypatch: pytest.MonkeyPatch) -> None:
    def fine(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return of_logits(x.float() @ weight.float().T, target)

    without_draws = exact_runs(fine, Draws.ALL, monkeypatch)
    assert exact_runs(loss, Draws.ALL, monkeypatch) == without_draws + limits.FEW_DRAWS == without_draws + 3
    assert exact_runs(loss, Draws.FEW, monkeypatch) == without_draws, "only a candidate that fails needs them"


@pytest.mark.parametrize("candidate", [honest, in_float32])
def test_an_honest_candidate_passes_where_the_reference_is_exact_by_chance(
    candidate: Function, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = by_chance()
    assert compared(loss, candidate, values, monkeypatch)[0] == ""


@pytest.mark.parametrize("candidate", [scaled, without_a_class])
@pytest.mark.parametrize("seed", range(3))
def test_a_wrong_candidate_fails(candidate: Function, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "values" in compared(loss, candidate, inputs(seed), monkeypatch)[0]
