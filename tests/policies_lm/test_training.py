"""The trainer learns on a small tree: by imitation the best path, by PPO what earns most."""

from __future__ import annotations

import math

import pytest
import torch

from mtmc_lsp.training.lm.best_paths import best_path, examples
from mtmc_lsp.training.lm.messages import CurvePoint, Phase
from mtmc_lsp.training.lm.parameters import Ablation, LmParameters
from mtmc_lsp.training.lm.worker import trainer
from mtmc_lsp.training.lm.worker.ppo import normalised
from mtmc_lsp.training.lm.worker.rollout import Decision, endless_walks, greedy_reward, least_stop_margin
from mtmc_lsp.training.lm.worker.trainer import Trainer
from tests.policies_lm.trees import parameters, tree

ONLY_PPO = Ablation(supervised=False)
HIGHEST_REWARD = 3.2
"""Of the tree: fuse 1.5, tune 1.4, graph 0.3 (correct, not faster), STOP 0. Any other order or end earns less."""


@pytest.fixture(autouse=True)
def _one_thread() -> object:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def trained(options: LmParameters, updates: int | None = None) -> tuple[Trainer, list[CurvePoint]]:
    training = Trainer([tree()], options, "cpu")
    return training, [training.run(number) for number in range(1, (updates or training.updates) + 1)]


def test_ppo_finds_the_walk_that_earns_most() -> None:
    options = parameters(ablation=ONLY_PPO)
    before = greedy_reward(Trainer([tree()], options, "cpu").model, [tree()], options)
    training, points = trained(options)
    assert {point.phase for point in points} == {Phase.WARM_UP, Phase.PPO}
    assert before < HIGHEST_REWARD - 0.1
    assert greedy_reward(training.model, [tree()], options) == pytest.approx(HIGHEST_REWARD)
    first, last = points[0].reward, points[-1].reward
    assert first is not None and last is not None
    assert first < 2.0 and last > 3.0


def test_ppo_with_the_sign_of_the_advantage_flipped_learns_the_opposite(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above would fail: what earns least becomes most probable."""
    monkeypatch.setattr(trainer, "normalised", lambda values: -normalised(values))
    options = parameters(ablation=ONLY_PPO, ppo_updates=15)
    training, points = trained(options)
    assert greedy_reward(training.model, [tree()], options) < 1.0
    last = points[-1].reward
    assert last is not None and last < 0.5


def test_the_supervised_start_reaches_the_best_path() -> None:
    options = parameters(warmup_updates=0, ppo_updates=0, supervised_epochs=20)
    training, points = trained(options)
    assert points[-1].accuracy == 1.0
    known = examples([tree()], options, with_failures=False)
    logs, _ = training.model.weigh_all([training.model.situation(each.state, each.texts) for each in known])
    chosen = [each.texts[values.index(max(values))] for each, values in zip(known, logs, strict=True)]
    assert chosen == [each.texts[each.best] for each in known]
    assert [edge.text for edge in best_path(tree(), 8)] == ["fuse.", "tune."]
    assert chosen[:2] == ["fuse.", "tune."] and all(text.startswith("stop") for text in chosen[2:])


def test_an_interrupted_training_gives_identical_results() -> None:
    options = parameters(supervised_epochs=2, warmup_updates=1, ppo_updates=4, minibatch=16, lora_dropout=0.1)
    whole, points = trained(options)
    for stop in (1, 4, whole.updates - 1):
        first, _ = trained(options, stop)
        state = first.model.state()
        second = Trainer([tree()], options, "cpu")
        second.model.restore(state)
        rest = [second.run(number) for number in range(stop + 1, second.updates + 1)]
        assert list(map(_numbers, rest)) == list(map(_numbers, points[stop:]))
        for name, weight in second.model.trained.items():
            assert torch.equal(weight, whole.model.trained[name])


def test_held_out_trees_are_validated_and_never_trained_on() -> None:
    options = parameters(supervised_epochs=1, warmup_updates=1, ppo_updates=1)
    training = Trainer([tree("a"), tree("b", is_held_out=True), tree("c")], options, "cpu")
    assert [each.program for each in training.trees] == ["a", "c"]
    assert all("Task: b" not in example.state for example in training.examples)
    last = [training.run(number) for number in range(1, training.updates + 1)][-1]
    assert last.validation_top1 is not None and 0 <= last.validation_top1 <= 1
    assert last.validation_reward is not None


def test_an_update_ends_when_the_policy_has_moved_too_far(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    monkeypatch.setattr(
        trainer.PolicyModel, "step", lambda self, rate, step=trainer.PolicyModel.step: steps.append(step(self, rate))
    )
    options = parameters(ablation=ONLY_PPO, warmup_updates=0, ppo_updates=1, epochs=6, policy_rate=2e-3, target_kl=10.0)
    trained(options)
    unlimited = len(steps)
    steps.clear()
    _, points = trained(
        parameters(ablation=ONLY_PPO, warmup_updates=0, ppo_updates=1, epochs=6, policy_rate=2e-3, target_kl=1e-4)
    )
    assert unlimited == 6 and 0 < len(steps) < 6
    assert points[-1].kl is not None and points[-1].kl > 1e-4


def _numbers(point: CurvePoint) -> dict[str, object]:
    return {name: value for name, value in vars(point).items() if name != "seconds"}


def test_stop_needs_the_least_lead_that_keeps_the_speedup() -> None:
    never = -math.inf
    early = ([Decision(never, 0.0), Decision(0.4, 0.1), Decision(0.8, 0.7)], 0.7)
    assert least_stop_margin([early]) == 0.5, "with 0.25, the walk ends with a gain of 0.1"
    assert least_stop_margin([([Decision(never, 0.0), Decision(0.4, 0.7)], 0.7)]) == 0.0, "nothing is lost"
    sure = ([Decision(never, 0.0), Decision(50.0, 0.1)], 0.7)
    assert least_stop_margin([sure]) == 8.0, "the largest margin"
    assert least_stop_margin([]) == 0.0


def test_walks_that_never_stop_end_with_what_the_most_probable_actions_reach() -> None:
    options = parameters(warmup_updates=0, ppo_updates=0, supervised_epochs=20)
    training, _ = trained(options)
    ((decisions, gain),) = endless_walks(training.model, [tree()], options)
    assert gain == pytest.approx(math.log(3.0)), "fuse, then tune"
    assert decisions[0].stop_lead == -math.inf and [each.gain for each in decisions[:3]] == pytest.approx(
        [0.0, math.log(2.0), math.log(3.0)]
    )
    assert decisions[1].stop_lead < 0 < decisions[2].stop_lead, "STOP is right after the best path alone"
