"""The best action of each version by the measured times of its tree, and the examples of the supervised start."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mtmc_lsp.core.learning.transitions import Outcome
from mtmc_lsp.policies.lm.action_text import STOP_TEXT
from mtmc_lsp.training.lm.environment import edge_texts, tree_state, tried
from mtmc_lsp.training.lm.parameters import LmParameters
from mtmc_lsp.training.lm.tree import DecisionTree, Edge

TIMED = (Outcome.FASTER, Outcome.SLOWER)


@dataclass(frozen=True)
class Example:
    """A state, the texts of its legal actions, and the index of the best one.

    STOP is at the end, except in a state without history: a run tries at least one step.
    """

    state: str
    texts: tuple[str, ...]
    best: int
    targets: tuple[float, ...] = ()
    """The probability that each choice should have: STOP and the actions that gain share it by what they reach."""
    regrets: tuple[float, ...] = ()
    """What each choice loses against the best one, as a logarithm of a speedup."""


def reached_gains(tree: DecisionTree, horizon: int) -> dict[str, dict[str, float]]:
    """For each version, what its actions reach: the logarithm of the speedup of the fastest path that begins with an action.

    Only actions that a search continues from are listed. Versions without a timed action are left out: nothing is known about
    them.

    Args:
        horizon: the longest path. It also bounds paths in circles, which noise can make look faster and faster.
    """
    values: dict[str, float] = dict.fromkeys(tree.nodes, 0.0)
    gains: dict[str, dict[str, float]] = {}
    kept = {
        name: [edge for edge in node.edges if edge.is_kept(is_first=name == tree.root)]
        for name, node in tree.nodes.items()
    }
    for _ in range(horizon):
        gains = {
            name: {edge.key: _gain(edge) + values.get(edge.result, 0.0) for edge in edges}
            for name, edges in kept.items()
        }
        values = {name: max([0.0, *reached.values()]) for name, reached in gains.items()}
    return {name: gains[name] for name, node in tree.nodes.items() if any(edge.outcome in TIMED for edge in node.edges)}


def best_actions(tree: DecisionTree, horizon: int) -> dict[str, Edge | None]:
    """The first action of the fastest path from each version of :func:`reached_gains`; None where STOP is best."""
    best: dict[str, Edge | None] = {}
    for name, reached in reached_gains(tree, horizon).items():
        edges = [edge for edge in tree.nodes[name].edges if reached.get(edge.key, 0.0) > 0]
        best[name] = max(edges, key=lambda edge: reached[edge.key], default=None)
    return best


def best_path(tree: DecisionTree, horizon: int) -> list[Edge]:
    """The fastest path from the root."""
    best = best_actions(tree, horizon)
    path: list[Edge] = []
    version = tree.root
    while len(path) < horizon and (edge := best.get(version)) is not None:
        path.append(edge)
        version = edge.result
    return path


def examples(
    trees: Iterable[DecisionTree], parameters: LmParameters, *, with_failures: bool, epoch: int = 0
) -> list[Example]:
    """One example for each version with a known best action.

    Args:
        with_failures: whether to add a second one, in which some of the other actions were tried before without success: so
            the policy sees the histories of a search, and versions where all that pays was tried.
        epoch: each epoch draws other failures.
    """
    result = []
    for tree in trees:
        gains = reached_gains(tree, parameters.most_steps)
        for version, edge in best_actions(tree, parameters.most_steps).items():
            known = (tree, version, edge, gains[version])
            if edge is not None or version != tree.root:
                result.append(_example(*known, (), parameters))
            choice = random.Random(f"{parameters.seed} {epoch} {version}" if epoch else f"{parameters.seed} {version}")
            is_first = version == tree.root
            others = [
                each for each in tree.nodes[version].edges if each is not edge and not each.is_kept(is_first=is_first)
            ]
            if with_failures and others:
                before = tuple(choice.sample(others, choice.randint(1, len(others))))
                result.append(_example(*known, before, parameters))
    # With a single choice there is nothing to learn.
    return [example for example in result if len(example.texts) > 1]


def _example(
    tree: DecisionTree,
    version: str,
    best: Edge | None,
    reached: Mapping[str, float],
    before: tuple[Edge, ...],
    parameters: LmParameters,
) -> Example:
    node = tree.nodes[version]
    keys = {edge.key for edge in before}
    left = [edge for edge in node.edges if edge.key not in keys]
    history = [tried(edge) for parent, key in node.path for edge in tree.nodes[parent].edges if edge.key == key]
    history += [tried(edge) for edge in node.edges if edge.key in keys]
    state = tree_state(tree, version, history, left, parameters.ablation, tokens=parameters.state_tokens)
    texts = (*edge_texts(node, left), *[STOP_TEXT] * bool(history))
    gains = [reached.get(edge.key, 0.0) for edge in left]
    targets = _targets([gain if gain > 0 else None for gain in gains], parameters, has_stop=bool(history))
    known = [max(0.0, gain) for gain in gains] + [parameters.stop_gain] * bool(history)
    regrets = tuple(max(known) - gain for gain in known)
    return Example(state, texts, left.index(best) if best is not None else len(left), targets, regrets)


def _targets(gains: Sequence[float | None], parameters: LmParameters, *, has_stop: bool) -> tuple[float, ...]:
    """A softmax over what choices reach; None for an action that gains nothing, which should never be chosen."""
    reached = [*gains, *[parameters.stop_gain] * has_stop]
    most = max((gain for gain in reached if gain is not None), default=0.0)
    weights = [math.exp((gain - most) / parameters.target_temperature) if gain is not None else 0.0 for gain in reached]
    total = math.fsum(weights)
    return tuple(weight / total for weight in weights) if total else ()


def _gain(edge: Edge) -> float:
    """The logarithm of the speedup; negative for a base that is slower than the user's code."""
    return math.log(edge.ratio) if edge.outcome in TIMED and edge.ratio else 0.0
