"""The formulas of PPO (arXiv 1707.06347) with generalised advantage estimation (arXiv 1506.02438)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Loss:
    """The loss of a minibatch and its parts."""

    total: torch.Tensor
    objective: torch.Tensor
    """The clipped objective with its sign turned: less is better."""
    entropy: torch.Tensor
    kl: torch.Tensor
    """Estimate of the divergence from the policy that walked: the mean of ``ratio - 1 - log ratio``."""
    clipped: torch.Tensor


class ValueHead(torch.nn.Module):  # type: ignore[misc]
    """The expected sum of rewards, from the hidden state of a state's last token.

    It gets the hidden state without gradients, so that its training does not move the policy.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.LayerNorm(size), torch.nn.Linear(size, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)
        )
        last: Any = self.layers[-1]
        torch.nn.init.zeros_(last.weight)
        torch.nn.init.zeros_(last.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = self.layers(hidden.detach().float())[:, 0]
        return values


def advantages(rewards: Sequence[float], values: Sequence[float], gamma: float, decay: float) -> list[float]:
    """The advantages of the steps of one walk, which has ended: nothing comes after its last step."""
    result: list[float] = []
    following, after = 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        after = reward + gamma * following - value + gamma * decay * after
        following = value
        result.append(after)
    return result[::-1]


def normalised(values: torch.Tensor) -> torch.Tensor:
    """With mean 0 and deviation 1; a single or constant value becomes 0."""
    spread = values.std(unbiased=False)
    return (values - values.mean()) / (spread + 1e-8)


def ppo_loss(
    logs: Sequence[torch.Tensor],
    chosen: Sequence[int],
    old: torch.Tensor,
    advantage: torch.Tensor,
    *,
    clip: float,
    entropy: float,
) -> Loss:
    """The loss of a minibatch.

    Args:
        logs: for each step, the log-probabilities of its legal actions.
        chosen: the action that was taken.
        old: its log-probability at the walk.
        entropy: weight of the entropy bonus.
    """
    flat, counts = torch.cat(list(logs)), [len(each) for each in logs]
    begins = [0, *itertools.accumulate(counts)]
    taken = torch.tensor([begin + index for begin, index in zip(begins, chosen, strict=False)], device=flat.device)
    new = flat.index_select(0, taken)
    change = new - old
    ratio = change.exp()
    limited = ratio.clamp(1 - clip, 1 + clip)
    objective = -torch.minimum(ratio * advantage, limited * advantage).mean()
    spread = -(flat.exp() * flat).sum() / len(counts)
    with torch.no_grad():
        kl = (ratio - 1 - change).mean()
        clipped = ((ratio - 1).abs() > clip).float().mean()
    return Loss(objective - entropy * spread, objective, spread, kl, clipped)
