"""The offline tree as the environment of reinforcement learning: a walk from the root, as the greedy search would go."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mtmc_lsp.policies.lm.action_text import STOP_TEXT
from mtmc_lsp.policies.lm.numbers import choices_text, numbered_texts
from mtmc_lsp.policies.lm.prompt import Tried, state_text
from mtmc_lsp.training.lm.parameters import Ablation, LmParameters
from mtmc_lsp.training.lm.tree import DecisionTree, Edge, Node


def tried(edge: Edge) -> Tried:
    """The step in the history. The number that tells equal texts apart is left out, as in a search."""
    return Tried(edge.text.partition(" #")[0], edge.outcome, edge.ratio)


def edge_texts(node: Node, edges: Sequence[Edge]) -> list[str]:
    """The texts of some actions of a version as the choices of one decision."""
    return numbered_texts([edge.text for edge in edges], [edge.numbers for edge in edges], node.predicted_us)


def tree_state(
    tree: DecisionTree,
    version: str,
    history: list[Tried],
    edges: Sequence[Edge],
    ablation: Ablation,
    *,
    tokens: int,
) -> str:
    """The text of a state with some choices besides STOP."""
    node = tree.nodes[version]
    device = tree.device if ablation.hardware else ""
    shown = history if ablation.history else []
    choices = choices_text([edge.numbers for edge in edges], node.predicted_us)
    return state_text(device, tree.task, node.schedule, shown, choices, tokens=tokens)


class Walk:
    """One episode. Actions that were never measured on the present version do not exist, and none is tried twice."""

    def __init__(self, tree: DecisionTree, parameters: LmParameters) -> None:
        self._tree = tree
        self._parameters = parameters
        self._version = tree.root
        self._history: list[Tried] = []
        self._tried: set[str] = set()
        self._stopped = False
        self.total = 0.0
        """Sum of the rewards so far."""
        self._gain = 0.0
        self.best_gain = 0.0
        """Logarithm of the best speedup so far over the user's code."""

    @property
    def edges(self) -> list[Edge]:
        """The measured, untried actions of the present version."""
        return [edge for edge in self._tree.nodes[self._version].edges if edge.key not in self._tried]

    @property
    def has_stop(self) -> bool:
        """Whether STOP is a choice: a run tries at least one step."""
        return bool(self._history)

    @property
    def texts(self) -> list[str]:
        """The texts of the legal actions; STOP is the last one, except at the beginning: a run tries at least one step."""
        texts = edge_texts(self._tree.nodes[self._version], self.edges)
        return [*texts, *[STOP_TEXT] * bool(self._history)]

    @property
    def state(self) -> str:
        """The text of the state."""
        parameters = self._parameters
        known = (self._tree, self._version, self._history, self.edges, parameters.ablation)
        return tree_state(*known, tokens=parameters.state_tokens)

    @property
    def is_done(self) -> bool:
        """Whether the walk has ended: by STOP, at the longest length, or because nothing is left to try."""
        return self._stopped or len(self._history) >= self._parameters.most_steps or not self.edges

    def act(self, index: int) -> float:
        """Take the action at ``index`` of :attr:`texts`; returns its reward. STOP costs and earns nothing."""
        edges = self.edges
        if index == len(edges):
            self._stopped = True
            return 0.0
        edge = edges[index]
        self._tried.add(edge.key)
        self._history.append(tried(edge))
        if edge.result and edge.is_kept(is_first=self._version == self._tree.root):
            self._version = edge.result
            self._gain += math.log(edge.ratio) if edge.ratio else 0.0
            self.best_gain = max(self.best_gain, self._gain)
        reward = self._parameters.rewards.of(
            edge.outcome, len(self._history), staged=self._parameters.ablation.staged_rewards
        )
        self.total += reward
        return reward
