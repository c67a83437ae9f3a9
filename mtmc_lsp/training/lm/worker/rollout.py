"""Walks through the trees with the present policy."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from mtmc_lsp.training.lm.environment import Walk
from mtmc_lsp.training.lm.parameters import LmParameters
from mtmc_lsp.training.lm.tree import DecisionTree
from mtmc_lsp.training.lm.worker.policy_model import PolicyModel, Situation
from mtmc_lsp.training.lm.worker.ppo import advantages


@dataclass(frozen=True)
class TakenStep:
    """One step of a walk, for training."""

    situation: Situation
    chosen: int
    log_probability: float
    advantage: float
    hidden: torch.Tensor
    """The hidden state that the value head reads."""
    outcome: float
    """The sum of rewards that the value head should predict."""


@dataclass
class Rollout:
    """The steps of several walks."""

    steps: list[TakenStep] = field(default_factory=list)
    totals: list[float] = field(default_factory=list)

    @property
    def reward(self) -> float:
        """Mean total reward of a walk."""
        return sum(self.totals) / len(self.totals)

    @property
    def length(self) -> float:
        """Mean number of steps of a walk."""
        return len(self.steps) / len(self.totals)


@dataclass
class _Trace:
    """A walk with what is known of each of its steps."""

    walk: Walk
    situations: list[Situation] = field(default_factory=list)
    chosen: list[int] = field(default_factory=list)
    logs: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    hidden: list[torch.Tensor] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)


def roll_out(
    model: PolicyModel, trees: Sequence[DecisionTree], parameters: LmParameters, choice: random.Random
) -> Rollout:
    """Walk through random trees, with actions drawn from the policy."""
    traces = [_Trace(Walk(choice.choice(trees), parameters)) for _ in range(parameters.walks)]
    _finish(model, traces, choice)
    rollout = Rollout()
    for trace in traces:
        gains = advantages(trace.rewards, trace.values, parameters.gamma, parameters.gae_lambda)
        rollout.totals.append(trace.walk.total)
        rollout.steps += [
            TakenStep(situation, chosen, log, gain, hidden, gain + value)
            for situation, chosen, log, gain, hidden, value in zip(
                trace.situations, trace.chosen, trace.logs, gains, trace.hidden, trace.values, strict=True
            )
        ]
    return rollout


def greedy_reward(model: PolicyModel, trees: Sequence[DecisionTree], parameters: LmParameters) -> float:
    """Mean total reward if the most probable action is taken."""
    traces = [_Trace(Walk(tree, parameters)) for tree in trees]
    _finish(model, traces, None)
    return sum(trace.walk.total for trace in traces) / len(traces)


def _finish(model: PolicyModel, traces: Sequence[_Trace], choice: random.Random | None) -> None:
    """Walk to the end, all walks at once; without a random generator by the most probable action."""
    while active := [trace for trace in traces if not trace.walk.is_done]:
        situations = [model.situation(trace.walk.state, trace.walk.texts) for trace in active]
        logs, hidden = model.weigh_all(situations)
        known = zip(active, situations, logs, hidden, model.values(hidden), strict=True)
        for trace, situation, several, last, value in known:
            index = _best(several) if choice is None else _drawn(several, choice)
            trace.situations.append(situation)
            trace.chosen.append(index)
            trace.logs.append(several[index])
            trace.hidden.append(last)
            trace.values.append(value)
            trace.rewards.append(trace.walk.act(index))


def _best(logs: Sequence[float]) -> int:
    return max(range(len(logs)), key=lambda index: logs[index])


def _drawn(logs: Sequence[float], choice: random.Random) -> int:
    return choice.choices(range(len(logs)), [math.exp(log) for log in logs])[0]
