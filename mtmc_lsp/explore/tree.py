"""The tree of one program: versions as nodes, what was tried on each, and which node is expanded next."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from mtmc_lsp.core.action import MacroAction
from mtmc_lsp.core.json_codec import from_json
from mtmc_lsp.core.learning.transitions import Outcome, Transition, Version
from mtmc_lsp.core.results import Timing, Verdict
from mtmc_lsp.core.run import Candidate, Step, StepStatus
from mtmc_lsp.explore.judgement import GOOD

BEST_SHARE = 0.5
"""How often the most promising node is expanded; otherwise a random one."""
FAILED = (Outcome.NOT_LEGAL, Outcome.COMPILE_ERROR, Outcome.WRONG, Outcome.OUT_OF_TIME)
VARIANT = "variant"
"""``chosen_by`` of a configuration that an action measured."""


@dataclass
class Node:
    """A version that actions are tried on."""

    version: Version
    path: tuple[Step, ...] = ()
    """The steps that lead to it, as the planner sees them."""
    speedup: float = 1.0
    """Over the user's code: measured, or predicted where nothing was timed."""
    keys: set[str] = field(default_factory=set)
    """Keys of the actions that were tried on it."""
    count: int = 0
    """Number of these actions, without the configurations that an action measured."""
    failures: list[Step] = field(default_factory=list)
    """The tried actions that are not worth trying again."""
    is_exhausted: bool = False
    """Whether no further action is known."""

    @property
    def history(self) -> tuple[Step, ...]:
        """The steps that the planner knows: the path, and what failed here."""
        return (*self.path, *self.failures)


class Tree:
    """All nodes of one program on one device."""

    def __init__(self, root: Version, device: str, *, depth: int, width: int) -> None:
        """Begin with the user's code.

        Args:
            device: as in transitions; transitions on other devices do not count.
            depth: most actions since the user's code.
            width: most actions tried on one version.
        """
        self._device, self._depth, self._width = device, depth, width
        self.root = Node(root)
        self.nodes: dict[str, Node] = {root.id: self.root}
        self.versions: set[str] = {root.id}
        """Ids of all versions that were written."""
        self._known: dict[tuple[str, str], Transition] = {}

    def load(self, versions: Iterable[Version], transitions: Sequence[Transition]) -> None:
        """Take over what an earlier process measured, in its order."""
        stored = {version.id: version for version in versions}
        self.versions |= set(stored)
        for transition in transitions:
            node = self.nodes.get(transition.version)
            if transition.device == self._device and node is not None:
                self.add(node, transition, stored.get(transition.result))

    def add(
        self,
        node: Node,
        transition: Transition,
        version: Version | None,
        timing: Timing | None = None,
        verdict: Verdict | None = None,
    ) -> None:
        """Add a transition from a node to a version.

        Args:
            version: the version that was written; None if there is none.
            timing: of the version, for the planner.
            verdict: on the version, for the planner.
        """
        node.keys.add(transition.key)
        node.count += transition.chosen_by != VARIANT
        step = _step(node, transition, version, timing, verdict)
        if step.status is not StepStatus.ACCEPTED and transition.chosen_by != VARIANT:
            node.failures.append(step)
        if version is None:
            return
        self.versions.add(version.id)
        self._known.setdefault(self._pair(node.version.id, version.id), transition)
        if transition.outcome in GOOD and version.id not in self.nodes and version.depth <= self._depth:
            path = (*node.path, _step(node, transition, version, timing, verdict, is_path=True))
            self.nodes[version.id] = Node(version, path, self._speedup(node, transition, version))

    def known(self, node: Node, version: str) -> Transition | None:
        """An earlier transition that decides how a version compares with a node's.

        Without a time, the outcome is that of the version alone, whatever version it was written from.
        """
        return self._known.get(self._pair(node.version.id, version))

    def next(self, rng: random.Random) -> Node | None:
        """The node to expand next; None if nothing is left."""
        open_nodes = [node for node in self.nodes.values() if self.room(node) > 0 and not node.is_exhausted]
        if not open_nodes:
            return None
        if rng.random() < BEST_SHARE:
            return max(open_nodes, key=lambda node: node.speedup)
        return rng.choice(open_nodes)

    def room(self, node: Node) -> int:
        """How many more actions may be tried on a node."""
        return self._width - node.count if node.version.depth < self._depth else 0

    def _pair(self, before: str, after: str) -> tuple[str, str]:
        return (before if self._device else "", after)

    def _speedup(self, node: Node, transition: Transition, version: Version) -> float:
        if transition.ratio is not None:
            return node.speedup * transition.ratio
        before, after = self.root.version.predicted_us, version.predicted_us
        return before / after if before and after else node.speedup


def _step(
    node: Node,
    transition: Transition,
    version: Version | None,
    timing: Timing | None,
    verdict: Verdict | None,
    *,
    is_path: bool = False,
) -> Step:
    """A transition as a step of a run: accepted on the path to a version, and otherwise by its outcome."""
    status = StepStatus.FAILED if transition.outcome in FAILED else StepStatus.ACCEPTED
    if transition.outcome is Outcome.SLOWER and not is_path:
        status = StepStatus.REJECTED
    schedule: Mapping[str, object] | None = version.schedule if version is not None else None
    candidate = Candidate(version.id, node.version.id, None, "", None, schedule) if version is not None else None
    action = from_json(MacroAction, transition.action)
    number = len(node.path) + 1
    return Step(number, action, status, transition.detail, candidate=candidate, timing=timing, verdict=verdict)
