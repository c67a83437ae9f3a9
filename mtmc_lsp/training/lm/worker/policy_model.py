"""The policy under training: language model with an adapter or a new one, value head, and their optimisers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mtmc_lsp.policies.lm.policy_folder import ADAPTER, MODEL
from mtmc_lsp.policies.lm.worker.language_model import add_adapter, load_base
from mtmc_lsp.policies.lm.worker.scoring import (
    Action,
    Weighed,
    encode_action,
    encode_state,
    read_states,
    weigh_actions,
)
from mtmc_lsp.training.lm.parameters import LmParameters
from mtmc_lsp.training.lm.tree import DecisionTree
from mtmc_lsp.training.lm.worker.new_model import new_model
from mtmc_lsp.training.lm.worker.ppo import ValueHead

GPU_BATCHES = 8
"""How many microbatches a GPU reads at once. It has the memory, and small ones leave it idle."""


@dataclass(frozen=True)
class Situation:
    """A state with its legal actions, as tokens."""

    state: tuple[int, ...]
    actions: tuple[Action, ...]


class PolicyModel:
    """Weighs actions, estimates values, and takes steps of the optimisers."""

    def __init__(self, parameters: LmParameters, trees: Sequence[DecisionTree], device: str) -> None:
        """Load or make the model.

        Args:
            trees: those of the training; a new model has the vocabulary of their texts.
        """
        self._parameters = parameters
        if parameters.new_model:
            self.language_model = new_model(parameters.new_model, trees, parameters.seed, device)
            self._adapted = self.language_model.causal
        else:
            self.language_model = load_base(parameters.model, device, layers=parameters.layers)
            torch.manual_seed(parameters.seed)
            self._adapted = add_adapter(
                self.language_model,
                rank=parameters.lora_rank,
                alpha=parameters.lora_alpha,
                dropout=parameters.lora_dropout,
            )
        self.value_head = ValueHead(self.language_model.causal.config.hidden_size).to(device)
        self.trained = {name: each for name, each in self._adapted.named_parameters() if each.requires_grad}
        self.value_optimiser = torch.optim.AdamW(self.value_head.parameters(), lr=parameters.value_rate)
        self.renew_optimiser()
        self._actions: dict[str, Action] = {}

    def renew_optimiser(self) -> None:
        """Forget the moments of the policy's optimiser: a new phase has another loss."""
        self.optimiser = torch.optim.AdamW(self.trained.values(), lr=0.0, weight_decay=0.0)

    def situation(self, state: str, texts: Sequence[str]) -> Situation:
        """A state and its actions as tokens."""
        actions = tuple(self._action(text) for text in texts)
        longest = max(len(action.tokens) for action in actions)
        return Situation(tuple(encode_state(self.language_model, state, longest)), actions)

    def weigh(self, situations: Sequence[Situation]) -> Iterator[tuple[Weighed, torch.Tensor]]:
        """The log-probabilities of the actions, and the hidden state for the value head, of each state.

        One microbatch after the other; the hidden states carry no gradient.
        """
        step = self._parameters.microbatch * (GPU_BATCHES if self.language_model.device.type == "cuda" else 1)
        for start in range(0, len(situations), step):
            several = situations[start : start + step]
            states = read_states(self.language_model, [each.state for each in several])
            weighed = weigh_actions(
                self.language_model, states, [each.actions for each in several], self._parameters.normalisation
            )
            yield weighed, states.last_hidden.detach().float()

    def weigh_all(self, situations: Sequence[Situation]) -> tuple[list[list[float]], torch.Tensor]:
        """The same for all states at once, without gradients."""
        logs: list[list[float]] = []
        hidden: list[torch.Tensor] = []
        with torch.no_grad():
            for weighed, last in self.weigh(situations):
                known = iter(torch.cat(weighed.logs).tolist())
                logs += [[next(known) for _ in range(len(each))] for each in weighed.logs]
                hidden.append(last)
        return logs, torch.cat(hidden)

    def values(self, hidden: torch.Tensor) -> list[float]:
        """The expected sums of rewards."""
        with torch.no_grad():
            values: list[float] = self.value_head(hidden).tolist()
        return values

    def step(self, rate: float) -> None:
        """One step of the policy's optimiser with the gradients so far."""
        torch.nn.utils.clip_grad_norm_(self.trained.values(), self._parameters.most_gradient)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.optimiser.step()
        self.optimiser.zero_grad()

    def value_step(self) -> None:
        """One step of the value head's optimiser."""
        torch.nn.utils.clip_grad_norm_(self.value_head.parameters(), self._parameters.most_gradient)
        self.value_optimiser.step()
        self.value_optimiser.zero_grad()

    def state(self) -> dict[str, Any]:
        """All that training changes."""
        return {
            "weights": {name: each.detach().cpu() for name, each in self.trained.items()},
            "value_head": self.value_head.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "value_optimiser": self.value_optimiser.state_dict(),
            "random": torch.get_rng_state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state`."""
        with torch.no_grad():
            for name, each in self.trained.items():
                each.copy_(state["weights"][name])
        self.value_head.load_state_dict(state["value_head"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.value_optimiser.load_state_dict(state["value_optimiser"])
        torch.set_rng_state(state["random"])

    def save(self, folder: Path) -> None:
        """Write the adapter as peft does, or a new model as transformers does."""
        if self._parameters.new_model:
            # Half the size; the probabilities differ by far less than the probe tolerates.
            halves = {name: weight.detach().half() for name, weight in self._adapted.state_dict().items()}
            self._adapted.save_pretrained(str(folder / MODEL), state_dict=halves)
            self.language_model.tokenizer.save_pretrained(str(folder / MODEL))
        else:
            self._adapted.save_pretrained(str(folder / ADAPTER))

    def _action(self, text: str) -> Action:
        if text not in self._actions:
            self._actions[text] = encode_action(self.language_model, text)
        return self._actions[text]
