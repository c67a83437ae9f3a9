"""Probabilities of actions equal those that the definition gives, computed one token at a time without a cache."""

from __future__ import annotations

import math

import pytest
import torch

from mtmc_lsp.policies.lm.policy_folder import Normalisation
from mtmc_lsp.policies.lm.worker import scoring
from mtmc_lsp.policies.lm.worker.language_model import LanguageModel
from mtmc_lsp.policies.lm.worker.scoring import (
    Action,
    action_log_probabilities,
    encode_action,
    encode_state,
    read_on,
    read_states,
)
from tests.policies_lm.tiny import tiny_model

STATES = ("Task: 2 operations\nNext:", "Task: a longer state, with more words\nTried: nothing\nNext:")
ACTIONS = (
    ("fuse add, gelu.", "stop, nothing else will pay.", "fuse add."),
    ("tune the kernel.", "stop, nothing else will pay."),
)


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return tiny_model()


def token_products(model: LanguageModel, state: str, action: str) -> list[float]:
    """Log-probability of each token of the action: one forward pass of the whole text for each."""
    tokens = model.encode(state)
    logs = []
    for token in model.encode(f" {action}"):
        with torch.no_grad():
            logits = model.causal(input_ids=torch.tensor([tokens])).logits[0, -1].double()
        logs.append(math.log(math.exp(logits[token].item()) / logits.exp().sum().item()))
        tokens = [*tokens, token]
    return logs


def expected(model: LanguageModel, state: str, actions: tuple[str, ...], normalisation: Normalisation) -> list[float]:
    scores = []
    for action in actions:
        logs = token_products(model, state, action)
        parts = {
            Normalisation.SUM: 1,
            Normalisation.TOKEN_MEAN: len(logs),
            Normalisation.WORD_MEAN: len(action.split(" ")),
        }
        scores.append(math.exp(sum(logs) / parts[normalisation]))
    return [value / sum(scores) for value in scores]


def computed(model: LanguageModel, normalisation: Normalisation) -> list[list[float]]:
    actions = [[encode_action(model, text) for text in texts] for texts in ACTIONS]
    with torch.no_grad():
        states = read_states(model, [model.encode(text) for text in STATES])
        logs = action_log_probabilities(model, states, actions, normalisation)
    return [each.exp().tolist() for each in logs]


@pytest.mark.parametrize("normalisation", Normalisation)
def test_probabilities_are_products_of_token_probabilities_over_the_legal_actions(
    model: LanguageModel, normalisation: Normalisation
) -> None:
    for values, state, actions in zip(computed(model, normalisation), STATES, ACTIONS, strict=True):
        assert values == pytest.approx(expected(model, state, actions, normalisation), rel=1e-4)
        assert sum(values) == pytest.approx(1.0)


def test_normalisations_differ(model: LanguageModel) -> None:
    values = [computed(model, normalisation)[0] for normalisation in Normalisation]
    assert values[0] != pytest.approx(values[1], rel=0.01)
    assert values[1] != pytest.approx(values[2], rel=0.01)


def test_few_rows_at_once_give_the_same_probabilities(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = computed(model, Normalisation.SUM)
    monkeypatch.setattr(scoring, "MOST_ROWS", 2)
    assert computed(model, Normalisation.SUM) == [pytest.approx(each, rel=1e-5) for each in whole]


def test_a_state_that_continues_from_another_has_the_same_probabilities(model: LanguageModel) -> None:
    first, second = (
        model.encode(text) for text in ("Task: 2 operations\nTried: a\nNext:", "Task: 2 operations\nX\nNext:")
    )
    actions = [[encode_action(model, text) for text in ACTIONS[0]]]
    with torch.no_grad():
        once = read_on(model, first, None, 0)
        action_log_probabilities(model, once, actions, Normalisation.SUM)
        (again,) = action_log_probabilities(model, read_on(model, second, once, 19), actions, Normalisation.SUM)
        (fresh,) = action_log_probabilities(model, read_states(model, [second]), actions, Normalisation.SUM)
    assert first[:19] == second[:19] and first[19] != second[19]
    assert again.tolist() == pytest.approx(fresh.tolist(), rel=1e-4)


def test_gradients_reach_the_state_through_the_cache(model: LanguageModel) -> None:
    """The gradient of a score by an embedding equals the difference quotient."""
    actions = [[Action((70, 71, 72), 1), Action((80,), 1)]]
    weight = model.causal.get_input_embeddings().weight

    def loss() -> torch.Tensor:
        states = read_states(model, [[10, 11, 12, 13]])
        return action_log_probabilities(model, states, actions, Normalisation.SUM)[0][0]

    weight.grad = None
    loss().backward()
    gradient = weight.grad[11, 5].item()
    step = 1e-2
    with torch.no_grad():
        weight[11, 5] += step
        high = loss().item()
        weight[11, 5] -= 2 * step
        low = loss().item()
        weight[11, 5] += step
    assert gradient == pytest.approx((high - low) / (2 * step), rel=0.02)
    assert abs(gradient) > 1e-4


def test_a_state_that_exceeds_the_context_loses_its_middle(model: LanguageModel) -> None:
    text = "begin " + "x" * 3000 + " end"
    tokens = encode_state(model, text, 50)
    assert len(tokens) == model.context - 50
    kept = model.tokenizer.decode(tokens)
    assert kept.startswith("begin x") and kept.endswith("x end")
