"""Scores the actions of a state. Keeps the model and what it read last."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from mtmc_lsp.core.errors import Location, RequestError
from mtmc_lsp.policies.lm.messages import ScoreRequest, Scores
from mtmc_lsp.policies.lm.policy_folder import TRAIN_AGAIN, LmPolicyDescription, read_description
from mtmc_lsp.policies.lm.worker.language_model import LanguageModel, load_policy
from mtmc_lsp.policies.lm.worker.scoring import (
    ReadStates,
    action_log_probabilities,
    encode_action,
    encode_state,
    is_same_model,
    probe,
    read_on,
)

SMALL = 20_000_000
"""Below this number of weights, one thread reads: several wait for each other after every layer, seconds on a busy machine."""
CHANGED = (
    "the model of the policy does not give the probabilities that it had after the training: its weights, its tokenizer or its "
    "base model are damaged or were replaced"
)


@dataclass
class _Loaded:
    folder: str
    device: str
    model: LanguageModel
    description: LmPolicyDescription
    tokens: list[int] = field(default_factory=list)
    """Of the state that was read last."""
    states: ReadStates | None = None


_loaded: _Loaded | None = None


def score(request: ScoreRequest) -> Scores:
    """The probability of each action."""
    global _loaded
    start = time.monotonic()
    load_seconds = 0.0
    if _loaded is None or (_loaded.folder, _loaded.device) != (request.folder, request.device):
        description = read_description(Path(request.folder))
        model = load_policy(Path(request.folder), description, request.device)
        if description.probe and not is_same_model(probe(model), description.probe):
            raise RequestError(CHANGED, where=Location(request.folder), remedy=TRAIN_AGAIN)
        if sum(weight.numel() for weight in model.causal.parameters()) < SMALL:
            torch.set_num_threads(1)
        _loaded = _Loaded(request.folder, request.device, model, description)
        load_seconds = time.monotonic() - start
    start = time.monotonic()
    loaded = _loaded
    actions = [encode_action(loaded.model, text) for text in request.actions]
    tokens = encode_state(loaded.model, request.state, max(len(action.tokens) for action in actions))
    # The last token is read again in any case: its hidden state predicts the first token of each action.
    common = min(_common(tokens, loaded.tokens), len(tokens) - 1)
    previous, loaded.states, loaded.tokens = loaded.states, None, []
    with torch.no_grad():
        states = read_on(loaded.model, tokens, previous, common)
        (logs,) = action_log_probabilities(loaded.model, states, [actions], loaded.description.normalisation)
    loaded.states, loaded.tokens = states, tokens
    return Scores(
        tuple(logs.exp().tolist()),
        time.monotonic() - start,
        load_seconds,
        len(tokens),
        common,
        sum(len(action.tokens) for action in actions),
    )


def _common(tokens: list[int], others: list[int]) -> int:
    """Length of the common beginning."""
    pairs = enumerate(zip(tokens, others, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(tokens), len(others)))
