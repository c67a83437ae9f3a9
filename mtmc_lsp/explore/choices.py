"""Which actions of a version are tried: the roofline planner's choice, its runner-ups, and legal actions at random."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from mtmc_lsp.actions.base import IllegalAction, Situation, lines_of, with_saving
from mtmc_lsp.actions.catalogue import apply_action
from mtmc_lsp.actions.titles import operation_names, with_result
from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.protocols import State
from mtmc_lsp.ir.primitives import KernelIR
from mtmc_lsp.planners.roofline import RooflinePlanner

RUNNER_UP_SHARE = 0.5
"""Part of the actions after the first that follow the planner's order; the others are chosen at random."""
MOST_FUSED = 6
"""Most operations of a random fusion, before it takes in the kernels that it overlaps."""
TRIES = 4
"""How many random fusions are drawn for each that is wanted: most sets of operations form no kernel."""


class Actions(Protocol):
    """Finds the actions of a state."""

    def legal(
        self, state: State, tried: Collection[str], count: int, rng: random.Random
    ) -> tuple[list[tuple[int, MacroAction]], list[MacroAction]]:
        """The untried actions that a planner lists, with their positions, and up to ``count`` other legal ones."""


class RooflineActions:
    """The actions of the roofline planner, and random ones beside them."""

    def __init__(self, planner: RooflinePlanner, *, has_gpu: bool) -> None:
        """Prepare.

        Args:
            has_gpu: whether versions are timed. Otherwise some of the planner's actions cannot be judged.
        """
        self._planner, self._has_gpu = planner, has_gpu

    def legal(
        self, state: State, tried: Collection[str], count: int, rng: random.Random
    ) -> tuple[list[tuple[int, MacroAction]], list[MacroAction]]:
        situation = self._planner.situation(state)
        actions = [action for action in self._planner.ranked_in(situation) if action.key not in tried]
        listed = [(i, a) for i, a in enumerate(actions) if self._has_gpu or _needs_no_gpu(a)]
        return listed, unlisted_actions(situation, actions, tried, count, rng)


@dataclass(frozen=True)
class Chosen:
    """An action to try."""

    action: MacroAction
    rank: int
    """Position in the planner's order; -1 if the planner did not list it."""
    chosen_by: str
    """As in :class:`~mtmc_lsp.core.learning.transitions.Transition`."""


def variants_of(action: MacroAction) -> list[MacroAction]:
    """The single configurations of an action that measures several; none for any other action."""
    variants = action.params.get("variants")
    if not isinstance(variants, (list, tuple)):
        return []
    return [replace(action, params=dict(variant)) for variant in variants if isinstance(variant, Mapping)]


def _needs_no_gpu(action: MacroAction) -> bool:
    """Whether an action can be judged without a GPU: the reference is not rounded there as on a GPU, and nothing is timed."""
    is_rounded_rewrite = "rule" in action.params and action.changes_rounding
    return not variants_of(action) and not is_rounded_rewrite


def choose(
    listed: Sequence[tuple[int, MacroAction]], unlisted: Sequence[MacroAction], count: int, rng: random.Random
) -> list[Chosen]:
    """At most ``count`` actions: the first of the planner, its runner-ups, and random ones.

    Args:
        listed: in the planner's order, with the positions in it.
        unlisted: other legal actions.
    """
    if count < 1:
        return []
    in_order = 1 + round(RUNNER_UP_SHARE * (count - 1))
    chosen = [Chosen(action, rank, "runner-up" if rank else "roofline") for rank, action in listed[:in_order]]
    others = [Chosen(action, rank, "random") for rank, action in listed[in_order:]]
    others += [Chosen(action, -1, "random") for action in unlisted]
    return chosen + rng.sample(others, min(len(others), count - len(chosen)))


def unlisted_actions(
    situation: Situation, listed: Sequence[MacroAction], tried: Collection[str], count: int, rng: random.Random
) -> list[MacroAction]:
    """Up to ``count`` legal actions that the planner does not list: single configurations, and fusions of random operations."""
    known = {*tried, *(action.key for action in listed)}
    configurations = [variant for action in listed for variant in variants_of(action)]
    rng.shuffle(configurations)
    drawn = [*configurations[: -(-count // 2)], *_fusions(situation.ir, TRIES * count, rng)]
    actions: list[MacroAction] = []
    for action in drawn:
        if len(actions) < count and action.key not in known:
            known.add(action.key)
            actions += _if_legal(situation, action)
    return actions


def _if_legal(situation: Situation, action: MacroAction) -> list[MacroAction]:
    """The action with its predicted saving; nothing if it is illegal or changes nothing."""
    try:
        after = apply_action(situation.graph, situation.schedule, action)
        if after == situation.schedule:
            return []
        return [with_saving(situation, action, after)]
    except IllegalAction:
        return []


def _fusions(ir: KernelIR, count: int, rng: random.Random) -> Iterator[MacroAction]:
    """Fusions of random connected operations."""
    neighbours: dict[str, set[str]] = {node.name: set() for node in ir.graph.nodes}
    for node in ir.graph.nodes:
        for ref in node.inputs():
            if ref.name in neighbours:
                neighbours[node.name].add(ref.name)
                neighbours[ref.name].add(node.name)
    names = list(neighbours)
    for _ in range(count if names else 0):
        region = {rng.choice(names)}
        for _ in range(rng.randrange(MOST_FUSED)):
            around = sorted({other for name in region for other in neighbours[name]} - region)
            if around:
                region.add(rng.choice(around))
        nodes = tuple(name for name in names if name in region)
        operations = operation_names(ir, nodes)
        what = f"Fuse {operations} into one kernel" if len(nodes) > 1 else f"Run {operations} in a separate kernel"
        text = with_result(ir, what, nodes)
        yield MacroAction(
            ActionKind.FUSE, nodes, lines_of(ir, nodes), rationale="It is legal, and was chosen at random.", text=text
        )
