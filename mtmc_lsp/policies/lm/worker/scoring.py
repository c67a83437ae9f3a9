"""Probabilities of action texts in the TWOSOME form (arXiv 2401.14151): token probabilities, a score, a softmax over actions.

The state is read once. Its keys and values are then shared by all actions, which are read in one batch. The same code serves
training, where several states are one batch and gradients flow through both passes.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mtmc_lsp.policies.lm.policy_folder import Normalisation
from mtmc_lsp.policies.lm.worker.language_model import LanguageModel

MOST_ROWS = 64
"""Most actions that a CPU reads at once without gradients: each needs its copy of the state's keys and values."""
GPU_ROWS = 1024
"""The same on a GPU, which has as much to do for few rows as for many."""

PROBE_STATE = "GPU: none\nTask: 2 operations on x f32[64,200]\nadd(x) f32[64,200]\nKernels: none\nTried: nothing\nNext:"
PROBE_TEXTS = ("fuse add, gelu: tile 8x128 warps 2.", "use tensor cores for linear.", "stop, nothing else will pay.")
PROBE_TOLERANCE = 0.02


@dataclass
class ReadStates:
    """States that the model has read."""

    last_hidden: torch.Tensor
    """Hidden state of the last token of each state."""
    cache: Any
    """Keys and values."""
    mask: torch.Tensor
    """1 for tokens, 0 for padding on the left."""


@dataclass(frozen=True)
class Action:
    """An action's text for the model."""

    tokens: tuple[int, ...]
    words: int


def encode_action(model: LanguageModel, text: str) -> Action:
    """The action as it follows the state."""
    return Action(tuple(model.encode(f" {text}")), max(1, len(text.split())))


def encode_state(model: LanguageModel, text: str, longest: int) -> list[int]:
    """The state's tokens. If they do not fit into the model's context with ``longest`` more, the middle is left out."""
    tokens = model.encode(text)
    most = model.context - longest
    if len(tokens) <= most:
        return tokens
    return [*tokens[: most // 2], *tokens[len(tokens) - (most - most // 2) :]]


def probe(model: LanguageModel) -> tuple[float, ...]:
    """The mean log-probability of a token of each probe text: a fingerprint of weights and vocabulary."""
    actions = [encode_action(model, text) for text in PROBE_TEXTS]
    with torch.no_grad():
        states = read_states(model, [encode_state(model, PROBE_STATE, max(len(each.tokens) for each in actions))])
        tokens = token_log_probabilities(model, states, [0] * len(actions), actions).sum(1).tolist()
    return tuple(total / len(action.tokens) for total, action in zip(tokens, actions, strict=True))


def is_same_model(found: Sequence[float], expected: Sequence[float]) -> bool:
    """Whether two probes are of the same model, up to the rounding of another device."""
    pairs = zip(found, expected, strict=False)
    return len(found) == len(expected) and all(abs(one - other) <= PROBE_TOLERANCE for one, other in pairs)


def read_states(model: LanguageModel, states: Sequence[Sequence[int]]) -> ReadStates:
    """Read one or more states in one batch."""
    longest = max(map(len, states))
    ids = torch.zeros(len(states), longest, dtype=torch.long)
    mask = torch.zeros(len(states), longest, dtype=torch.long)
    for row, tokens in enumerate(states):
        ids[row, longest - len(tokens) :] = torch.tensor(tokens)
        mask[row, longest - len(tokens) :] = 1
    mask = mask.to(model.device, non_blocking=True)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = _cache_of([])
    hidden = _read(model, ids.to(model.device), mask, positions, cache)
    return ReadStates(hidden[:, -1], cache, mask)


def read_on(model: LanguageModel, tokens: Sequence[int], previous: ReadStates | None, common: int) -> ReadStates:
    """Read one state whose first ``common`` tokens are those of the state that was read before."""
    if previous is None or not common:
        return read_states(model, [tokens])
    cache = _cache_of([(layer.keys[:, :, :common], layer.values[:, :, :common]) for layer in previous.cache.layers])
    mask = torch.ones(1, len(tokens), dtype=torch.long, device=model.device)
    positions = torch.arange(common, len(tokens), device=model.device)[None]
    hidden = _read(model, torch.tensor([tokens[common:]], device=model.device), mask, positions, cache)
    return ReadStates(hidden[:, -1], cache, mask)


def token_log_probabilities(
    model: LanguageModel, states: ReadStates, rows: Sequence[int], actions: Sequence[Action]
) -> torch.Tensor:
    """The log-probability of each token of each action: one row for each action, with zeros after its last token.

    Args:
        rows: for each action, the index of its state.
    """
    index = torch.tensor(rows).to(model.device, non_blocking=True)
    longest = max(len(action.tokens) for action in actions)
    known_ids = torch.zeros(len(actions), longest, dtype=torch.long)
    known_mask = torch.zeros(len(actions), longest, dtype=torch.long)
    for row, action in enumerate(actions):
        known_ids[row, : len(action.tokens)] = torch.tensor(action.tokens)
        known_mask[row, : len(action.tokens)] = 1
    # Positions are computed here: a GPU would have to report how many there are, and everything would wait for it.
    counted = known_mask.flatten().nonzero()[:, 0].to(model.device, non_blocking=True)
    ids, mask = known_ids.to(model.device, non_blocking=True), known_mask.to(model.device, non_blocking=True)
    hidden = states.last_hidden.index_select(0, index)[:, None]
    if longest > 1:
        # The last token of a text predicts nothing that counts, so it is not read.
        read = states.mask.index_select(0, index)
        # The gradient of ``index_select`` is deterministic on the CPU, that of indexing is not.
        repeated = [
            (layer.keys.index_select(0, index), layer.values.index_select(0, index)) for layer in states.cache.layers
        ]
        cache = _cache_of(repeated)
        positions = read.sum(1, keepdim=True) + torch.arange(longest - 1, device=model.device)
        whole = torch.cat([read, mask[:, :-1]], 1)
        hidden = torch.cat([hidden, _read(model, ids[:, :-1], whole, positions, cache)], 1)
    logits = model.causal.get_output_embeddings()(hidden.flatten(0, 1).index_select(0, counted)).float()
    chosen = logits.gather(1, ids.flatten().index_select(0, counted)[:, None])[:, 0] - logits.logsumexp(1)
    padded = torch.zeros(len(actions) * longest, device=model.device).index_copy(0, counted, chosen)
    return padded.view(len(actions), longest)


@dataclass(frozen=True)
class Weighed:
    """The actions of several states, one list for each state."""

    logs: list[torch.Tensor]
    """Log-probabilities after the softmax over the actions of a state."""
    token_means: list[torch.Tensor]
    """The mean log-probability of a token of each action: how well the model knows such texts."""


def action_log_probabilities(
    model: LanguageModel,
    states: ReadStates,
    actions: Sequence[Sequence[Action]],
    normalisation: Normalisation,
) -> list[torch.Tensor]:
    """For each state, the log-probabilities of its actions after the softmax over them."""
    return weigh_actions(model, states, actions, normalisation).logs


def weigh_actions(
    model: LanguageModel,
    states: ReadStates,
    actions: Sequence[Sequence[Action]],
    normalisation: Normalisation,
) -> Weighed:
    """The same with what else is known of the texts."""
    flat = [(row, action) for row, several in enumerate(actions) for action in several]
    most = GPU_ROWS if model.device.type == "cuda" else MOST_ROWS
    step = len(flat) if torch.is_grad_enabled() else most
    parts: list[torch.Tensor] = []
    for start in range(0, len(flat), step):
        rows, texts = zip(*flat[start : start + step], strict=True)
        parts.append(token_log_probabilities(model, states, rows, texts).sum(1))
    totals = torch.cat(parts)
    scores = totals / torch.tensor([float(divisor(text, normalisation)) for _, text in flat], device=totals.device)
    means = totals / torch.tensor([float(len(text.tokens)) for _, text in flat], device=totals.device)
    counts = [len(several) for several in actions]
    index = torch.tensor([row for row, _ in flat]).to(scores.device, non_blocking=True)
    columns = torch.tensor([column for count in counts for column in range(count)]).to(scores.device, non_blocking=True)
    padded = scores.new_full((len(counts), max(counts)), -torch.inf).index_put((index, columns), scores)
    logs = padded.log_softmax(1).flatten().index_select(0, index * max(counts) + columns)
    return Weighed(list(logs.split(counts)), list(means.split(counts)))


def divisor(action: Action, normalisation: Normalisation) -> int:
    """What the sum of an action's log-probabilities is divided by."""
    if normalisation is Normalisation.TOKEN_MEAN:
        return len(action.tokens)
    return action.words if normalisation is Normalisation.WORD_MEAN else 1


def _read(
    model: LanguageModel, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Any
) -> torch.Tensor:
    """The hidden states of tokens that follow those in the cache, which gets their keys and values."""
    decoder = model.causal.base_model
    # transformers renames this argument: with version 5.40 the old name goes.
    name = "cache" if "cache" in inspect.signature(decoder.forward).parameters else "past_key_values"
    hidden: torch.Tensor = decoder(
        input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, **{name: cache}
    ).last_hidden_state
    return hidden


def _cache_of(layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """A cache that holds these keys and values, or nothing yet."""
    import transformers

    cache = transformers.DynamicCache()
    for number, (keys, values) in enumerate(layers):
        cache.update(keys, values, number)
    return cache
