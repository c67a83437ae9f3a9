"""The formulas of PPO, against values computed by hand or by their definition."""

from __future__ import annotations

import math

import pytest
import torch

from mtmc_lsp.training.lm.worker.ppo import ValueHead, advantages, normalised, ppo_loss

GAMMA, DECAY = 0.99, 0.95


def test_advantages_are_the_decayed_sum_of_one_step_errors() -> None:
    rewards, values = [1.5, -1.1, 0.3], [0.2, 0.4, -0.3]
    following = [*values[1:], 0.0]
    errors = [r + GAMMA * n - v for r, n, v in zip(rewards, following, values, strict=True)]
    expected = [sum((GAMMA * DECAY) ** (later - step) * errors[later] for later in range(step, 3)) for step in range(3)]
    assert advantages(rewards, values, GAMMA, DECAY) == pytest.approx(expected)


def test_without_decay_advantages_are_discounted_returns_less_the_values() -> None:
    assert advantages([1.0, 2.0], [0.5, 0.25], 0.9, 1.0) == pytest.approx([1.0 + 0.9 * 2.0 - 0.5, 2.0 - 0.25])


def test_normalised_advantages_have_mean_zero_and_deviation_one() -> None:
    values = normalised(torch.tensor([1.0, 2.0, 6.0]))
    assert values.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert values.std(unbiased=False).item() == pytest.approx(1.0)
    assert normalised(torch.tensor([3.0])).tolist() == [0.0]


@pytest.mark.parametrize(
    ("probability", "advantage", "objective", "slope"),
    [
        (0.6, 2.0, -2.4, True),  # ratio 1.2, at the limit
        (0.7, 2.0, -2.4, False),  # ratio 1.4: no reward for moving further
        (0.3, 2.0, -1.2, True),  # ratio 0.6: the way back counts
        (0.3, -2.0, 1.6, False),  # ratio 0.6, limited to 0.8
        (0.7, -2.0, 2.8, True),
    ],
)
def test_the_probability_ratio_is_clipped_where_it_would_gain(
    probability: float, advantage: float, objective: float, slope: bool
) -> None:
    logs = torch.tensor([probability, 1 - probability]).log().requires_grad_()
    old = torch.tensor([math.log(0.5)])
    loss = ppo_loss([logs], [0], old, torch.tensor([advantage]), clip=0.2 + 1e-6, entropy=0.0)
    assert loss.objective.item() == pytest.approx(objective, rel=1e-4)
    loss.total.backward()
    assert logs.grad is not None
    assert (logs.grad[0].abs().item() > 0) is slope


def test_the_loss_falls_as_good_actions_get_likelier_and_entropy_grows() -> None:
    logs = [torch.tensor([0.25, 0.75]).log(), torch.tensor([0.5, 0.3, 0.2]).log()]
    old = torch.stack([logs[0][0], logs[1][2]])
    loss = ppo_loss(logs, [0, 2], old, torch.tensor([1.0, -1.0]), clip=0.2, entropy=0.01)
    entropy = (-(0.25 * math.log(0.25) + 0.75 * math.log(0.75)) - sum(p * math.log(p) for p in (0.5, 0.3, 0.2))) / 2
    assert loss.entropy.item() == pytest.approx(entropy)
    assert loss.total.item() == pytest.approx(0.0 - 0.01 * entropy, abs=1e-6)
    assert loss.kl.item() == pytest.approx(0.0, abs=1e-7) and loss.clipped.item() == 0.0


def test_the_value_head_does_not_move_the_policy() -> None:
    hidden = torch.randn(3, 8, requires_grad=True)
    head = ValueHead(8)
    assert head(hidden).tolist() == [0.0, 0.0, 0.0]
    (head(hidden) - 1).square().mean().backward()
    assert hidden.grad is None
    assert any(parameter.grad is not None for parameter in head.parameters())
