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

MARGINS = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
MOST_LOSS = 0.005
"""Share of the geometric mean that stopping may cost, as for the ranker."""


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


@dataclass(frozen=True)
class Decision:
    """One decision of a walk that never stops."""

    stop_lead: float
    """How much larger the log-probability of STOP is than that of the best action; minus infinity where STOP is no choice."""
    gain: float
    """Logarithm of the speedup that stopping here keeps."""


def endless_walks(
    model: PolicyModel, trees: Sequence[DecisionTree], parameters: LmParameters
) -> list[tuple[list[Decision], float]]:
    """For each tree, a walk by the most probable action that never stops: its decisions, and the logarithm of its speedup."""
    walks = [Walk(tree, parameters) for tree in trees]
    decisions: list[list[Decision]] = [[] for _ in trees]
    while active := [number for number, walk in enumerate(walks) if not walk.is_done]:
        logs, _ = model.weigh_all([model.situation(walks[number].state, walks[number].texts) for number in active])
        for number, several in zip(active, logs, strict=True):
            walk = walks[number]
            actions = several[:-1] if walk.has_stop else several
            lead = several[-1] - max(actions) if walk.has_stop else -math.inf
            decisions[number].append(Decision(lead, walk.best_gain))
            walk.act(_best(actions))
    return [(several, walk.best_gain) for several, walk in zip(decisions, walks, strict=True)]


def least_stop_margin(walks: Sequence[tuple[Sequence[Decision], float]]) -> float:
    """The least lead of STOP at which walks may end and keep the speedup of walks that never stop, but for a small loss."""
    if not walks:
        return 0.0

    def final(margin: float) -> float:
        kept = (next((each.gain for each in several if each.stop_lead > margin), gain) for several, gain in walks)
        return math.fsum(kept) / len(walks)

    least = final(math.inf) + math.log1p(-MOST_LOSS)
    return next((margin for margin in MARGINS if final(margin) >= least), MARGINS[-1])


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
