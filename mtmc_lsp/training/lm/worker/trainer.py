"""The training: supervised start, warm-up of the value head, PPO. One update at a time, each defined by its number.

All randomness of an update comes from the seed and its number, so a training that was interrupted gives the same policy.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from mtmc_lsp.training.lm.best_paths import Example, examples
from mtmc_lsp.training.lm.messages import CurvePoint, Phase
from mtmc_lsp.training.lm.parameters import LmParameters
from mtmc_lsp.training.lm.tree import DecisionTree, share_of
from mtmc_lsp.training.lm.worker.policy_model import PolicyModel
from mtmc_lsp.training.lm.worker.ppo import normalised, ppo_loss
from mtmc_lsp.training.lm.worker.rollout import (
    Rollout,
    TakenStep,
    endless_walks,
    greedy_reward,
    least_stop_margin,
    roll_out,
)

Item = TypeVar("Item")


@dataclass(frozen=True)
class PolicyLosses:
    """Means over the minibatches of one update."""

    objective: float
    entropy: float
    kl: float
    clipped: float


class Trainer:
    """Knows the data and the plan of a training; :meth:`run` does one update."""

    def __init__(self, trees: Sequence[DecisionTree], parameters: LmParameters, device: str) -> None:
        self._parameters = parameters
        self.held_out = [tree for tree in trees if tree.is_held_out]
        training = [tree for tree in trees if not tree.is_held_out]
        self.trees = share_of(training, parameters.ablation.data, parameters.seed)
        supervised = parameters.ablation.supervised
        self.examples = examples(self.trees, parameters, with_failures=True) if supervised else []
        """Of the present epoch."""
        self._epoch = 0
        self._checked = _spread(examples(self.held_out, parameters, with_failures=False), parameters.most_validated)
        self.model = PolicyModel(parameters, self.trees, device)
        self._batches = -(-len(self.examples) // parameters.supervised_batch)
        self._supervised = parameters.supervised_epochs * self._batches
        self._first_ppo = self._supervised + parameters.warmup_updates + 1
        self.updates = self._supervised + parameters.warmup_updates + parameters.ppo_updates

    def phase(self, update: int) -> Phase:
        """The phase of update number ``update``, from 1."""
        if update <= self._supervised:
            return Phase.SUPERVISED
        return Phase.WARM_UP if update < self._first_ppo else Phase.PPO

    def run(self, update: int) -> CurvePoint:
        """Do one update."""
        start = time.monotonic()
        phase = self.phase(update)
        if phase is Phase.SUPERVISED:
            point = self._imitate(update)
        else:
            choice = random.Random(f"{self._parameters.seed} walks {update}")
            rollout = roll_out(self.model, self.trees, self._parameters, choice)
            point = CurvePoint(update, phase, 0.0, 0.0, reward=rollout.reward, steps=rollout.length)
            if phase is Phase.PPO:
                point = self._improve(update, rollout, choice, point)
            point = replace(point, value_loss=self._fit_values(rollout, choice))
        last = update in (self._supervised, self._first_ppo - 1, self.updates)
        if last or update % self._parameters.validate_every == 0:
            point = self._validated(point)
        return replace(point, seconds=time.monotonic() - start)

    def _imitate(self, update: int) -> CurvePoint:
        """One batch of the supervised start: cross-entropy over the legal actions."""
        parameters = self._parameters
        rate = parameters.supervised_rate * (1 - 0.9 * (update - 1) / self._supervised)
        batch = self._batch(update)
        situations = [self.model.situation(example.state, example.texts) for example in batch]
        rest = list(batch)
        losses, hits = 0.0, 0
        with fast_products(self.model.language_model.device):
            for weighed, _ in self.model.weigh(situations):
                several, rest = rest[: len(weighed.logs)], rest[len(weighed.logs) :]
                flat = torch.cat(weighed.logs)
                targets = torch.tensor([share for example in several for share in example.targets], device=flat.device)
                regrets = torch.tensor([each for example in several for each in example.regrets], device=flat.device)
                loss = -(flat * targets).sum() / len(batch)
                regret = (flat.exp() * regrets).sum() / len(batch)
                texts = -(torch.cat(weighed.token_means) * targets).sum() / len(batch)
                (loss + parameters.regret_weight * regret + parameters.text_weight * texts).backward()
                found = iter(flat.tolist())
                for example in several:
                    scores = [next(found) for _ in example.texts]
                    hits += scores.index(max(scores)) == example.best
                losses += loss.item()
        self.model.step(rate)
        return CurvePoint(update, Phase.SUPERVISED, 0.0, rate, loss=losses, accuracy=hits / len(batch))

    def _batch(self, update: int) -> list[Example]:
        """The examples of an update; each epoch has its order and its histories."""
        size = self._parameters.supervised_batch
        epoch, number = divmod(update - 1, self._batches)
        if epoch != self._epoch:
            self._epoch = epoch
            self.examples = examples(self.trees, self._parameters, with_failures=True, epoch=epoch)
        order = list(range(len(self.examples)))
        random.Random(f"{self._parameters.seed} epoch {epoch}").shuffle(order)
        # Epochs have nearly the same number of examples; the first one decides how many batches each has.
        order = [*order, *order]
        return [self.examples[index] for index in order[number * size : (number + 1) * size]]

    def _improve(self, update: int, rollout: Rollout, choice: random.Random, point: CurvePoint) -> CurvePoint:
        """PPO on the steps of the walks."""
        if update == self._first_ppo:
            self.model.renew_optimiser()
        parameters = self._parameters
        rate = parameters.policy_rate * (1 - (update - self._first_ppo) / parameters.ppo_updates)
        gains = normalised(torch.tensor([step.advantage for step in rollout.steps])).tolist()
        steps = list(zip(rollout.steps, gains, strict=True))
        losses: list[PolicyLosses] = []
        for _ in range(parameters.epochs):
            choice.shuffle(steps)
            for start in range(0, len(steps), parameters.minibatch):
                losses.append(self._policy_gradient(steps[start : start + parameters.minibatch]))
                if losses[-1].kl > parameters.target_kl:
                    self.model.optimiser.zero_grad()
                    break
                self.model.step(rate)
            else:
                continue
            break
        count = len(losses)
        return replace(
            point,
            learning_rate=rate,
            loss=sum(each.objective for each in losses) / count,
            entropy=sum(each.entropy for each in losses) / count,
            kl=losses[-1].kl,
            clipped=sum(each.clipped for each in losses) / count,
        )

    def _policy_gradient(self, steps: Sequence[tuple[TakenStep, float]]) -> PolicyLosses:
        """Add the gradients of a minibatch; its losses."""
        parameters = self._parameters
        objective = entropy = kl = clipped = 0.0
        rest = list(steps)
        for weighed, _ in self.model.weigh([step.situation for step, _ in steps]):
            logs = weighed.logs
            several, rest = rest[: len(logs)], rest[len(logs) :]
            device = logs[0].device
            loss = ppo_loss(
                logs,
                [step.chosen for step, _ in several],
                torch.tensor([step.log_probability for step, _ in several], device=device),
                torch.tensor([gain for _, gain in several], device=device),
                clip=parameters.clip,
                entropy=parameters.entropy,
            )
            share = len(several) / len(steps)
            (loss.total * share).backward()
            objective += loss.objective.item() * share
            entropy += loss.entropy.item() * share
            kl += loss.kl.item() * share
            clipped += loss.clipped.item() * share
        return PolicyLosses(objective, entropy, kl, clipped)

    def _fit_values(self, rollout: Rollout, choice: random.Random) -> float:
        """Several passes of the value head over the steps; the mean squared error of the first one."""
        parameters = self._parameters
        hidden = torch.stack([step.hidden for step in rollout.steps])
        expected = torch.tensor([step.outcome for step in rollout.steps], device=hidden.device)
        order = list(range(len(expected)))
        error = (self.model.value_head(hidden) - expected).square().mean().item()
        for _ in range(parameters.value_epochs):
            choice.shuffle(order)
            for start in range(0, len(order), parameters.minibatch):
                index = order[start : start + parameters.minibatch]
                loss = (self.model.value_head(hidden[index]) - expected[index]).square().mean()
                loss.backward()
                self.model.value_step()
        return float(error)

    def stop_margin(self) -> float:
        """How far STOP has to lead on held-out trees; 0 if no family is held out."""
        trees = _spread(self.held_out, self._parameters.most_validated)
        return least_stop_margin(endless_walks(self.model, trees, self._parameters))

    def _validated(self, point: CurvePoint) -> CurvePoint:
        """With the numbers of the held-out trees, if there are any."""
        top1 = reward = None
        if self._checked:
            logs, _ = self.model.weigh_all(
                [self.model.situation(example.state, example.texts) for example in self._checked]
            )
            hits = [each.index(max(each)) == example.best for each, example in zip(logs, self._checked, strict=True)]
            top1 = sum(hits) / len(hits)
        if self.held_out:
            trees = _spread(self.held_out, self._parameters.most_validated)
            reward = greedy_reward(self.model, trees, self._parameters)
        return replace(point, validation_top1=top1, validation_reward=reward)


@contextlib.contextmanager
def fast_products(device: torch.device) -> Iterator[None]:
    """Products in TF32 on a GPU. Not for PPO, which compares probabilities of one text from two batches of different sizes."""
    before = torch.get_float32_matmul_precision()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _spread(items: Sequence[Item], most: int) -> list[Item]:
    """At most ``most`` items, evenly spread."""
    step = max(1, -(-len(items) // most))
    return list(items[::step])
