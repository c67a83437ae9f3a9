"""Random rounding errors in the operations of the user's code."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from mtmc_lsp.verify.worker.gradients.cancellation import cancellation
from mtmc_lsp.verify.worker.gradients.rounding_noise import RoundingNoise

EQUAL_ROWS = torch.tensor([0.3, -1.7, 5.1]).reshape(3, 1).expand(3, 8).contiguous()


@pytest.mark.parametrize(
    "normalize",
    [
        lambda x: F.layer_norm(x, (8,)),
        lambda x: F.group_norm(x[None], 3),
        lambda x: F.instance_norm(x[None]),
        lambda x: F.batch_norm(x.T, None, None, training=True),
        lambda x: x - x.mean(-1, keepdim=True),
    ],
    ids=["layer_norm", "group_norm", "instance_norm", "batch_norm", "mean"],
)
def test_the_mean_of_equal_values_is_subtracted_with_rounding_errors(
    normalize: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    with RoundingNoise(1):
        assert 0 < normalize(EQUAL_ROWS.clone()).abs().max() < 0.01
    with RoundingNoise(1, units=1024):
        assert normalize(EQUAL_ROWS.clone()).all()


def test_an_operation_that_changes_statistics_keeps_its_operand_and_updates_them() -> None:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    kept, mean, variance = x.clone(), torch.zeros(4), torch.ones(4)
    with RoundingNoise(1):
        torch.ops.aten._native_batch_norm_legit(x, None, None, mean, variance, True, 0.1, 1e-5)
    assert torch.equal(x, kept)
    torch.testing.assert_close(mean, 0.1 * x.mean(0))
    torch.testing.assert_close(variance, 0.9 + 0.1 * x.var(0))


def test_views_stay_views() -> None:
    x = torch.ones(4, 2, dtype=torch.complex64)
    with RoundingNoise(1):
        torch.view_as_real(x).zero_()
    assert not x.any()


def test_one_of_two_opposite_draws_makes_a_maximum_follow_its_other_branch() -> None:
    """The advantages of equal rewards are 0, so rounding decides their signs and whether clipped ratios have a gradient."""
    rewards, ratio = torch.full((12,), 1.3), torch.tensor([0.2, 0.3, 0.4, 2.5, 3.0, 4.0]).repeat(2)

    def gradient(rewards: torch.Tensor, ratio: torch.Tensor) -> dict[int | str, torch.Tensor]:
        ratio = ratio.clone().requires_grad_()
        advantages = rewards - rewards.sum() / len(rewards)
        loss = torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)).sum()
        return {0: torch.autograd.grad(loss, ratio)[0]}

    for seed in range(0, 40, 2):

        def coarse_run(draw: int, seed: int = seed) -> dict[int | str, torch.Tensor]:
            with RoundingNoise(seed + draw - draw % 2, math.inf, is_opposite=bool(draw % 2)):
                return gradient(rewards.double(), ratio.double())

        value = {0: torch.zeros(12)}
        assert not cancellation(value, {0: value[0].double()}, (), coarse_run, coarse_run, 0).zeros


SATURATED = {
    "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu, erf": F.gelu,
    "written tanh": lambda x: 0.5 * x * (1 + torch.tanh(0.79788 * (x + 0.044715 * x**3))),
    "written erf": lambda x: 0.5 * x * (1 + torch.erf(x / 2**0.5)),
    "elu": lambda x: F.elu(10 * x) + 1,
    "sigmoid": lambda x: 1 - torch.sigmoid(-10 * x),
}


@pytest.mark.parametrize("name", SATURATED)
def test_an_element_that_cancels_to_zero_is_not_always_zero(name: str) -> None:
    gate = (-8 - 30 * torch.rand(40_000, generator=torch.Generator().manual_seed(0))).bfloat16()
    gate[:3] = 0.0 if name.startswith(("gelu", "written")) else gate[:3]
    function = SATURATED[name]

    def run(draw: int) -> dict[int | str, torch.Tensor]:
        with RoundingNoise(draw):
            return {0: function(gate)}

    def coarse_run(draw: int) -> dict[int | str, torch.Tensor]:
        with RoundingNoise(draw, math.inf):
            return {0: function(gate.double())}

    value = function(gate)
    zeros = cancellation({0: value}, {0: torch.zeros_like(value)}, (), run, coarse_run, 8).zeros
    assert not value[3:].all()
    expected = 3 if name.startswith(("gelu", "written")) else 0
    assert sum(int(mask.sum()) for mask in zeros.values()) == expected
