"""The groups that a ranker is trained on: one group is a state with its tried actions and STOP.

A version gives several groups: one before any of its actions was tried, and further ones after some failed. So the ranker sees
histories with failures, and learns to stop.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from mtmc_lsp.core.learning.transitions import Outcome, Program, Transition, Version
from mtmc_lsp.policies.experience import ExperienceCounter, experience_key
from mtmc_lsp.policies.feature_names import FEATURES
from mtmc_lsp.policies.features import Featurizer, Ranked
from mtmc_lsp.policies.history import FAILURES
from mtmc_lsp.training.labels import STOP, grade_of
from mtmc_lsp.training.tree import MeasuredTree, action_of, is_choice

FAILED_BEFORE = (0, 1, 2, 3)
"""How many of a version's actions that did not gain are in the history of its groups."""
UNTIMED_WEIGHT = 0.3
"""Weight of a group where nothing was timed, so that only failures are known."""
TRAIN, VALIDATION, TEST = "train", "validation", "test"
SplitOf = Callable[[Program], str]
"""The part that a program belongs to: ``train``, ``validation`` or ``test``."""


@dataclass(frozen=True)
class Group:
    """A state with its choices."""

    program: str
    version: str
    rows: tuple[array[float], ...]
    """All features of each choice; STOP is the last one if it is a choice."""
    labels: tuple[int, ...]
    ranks: tuple[int, ...]
    """Position of each choice in the roofline planner's order; STOP has the last one."""
    weight: float
    has_stop: bool


def groups_of(
    tree: MeasuredTree, programs: Collection[str], *, with_failures: bool = True
) -> tuple[list[Group], ExperienceCounter]:
    """The groups of some programs, and how often each kind of action gained in them.

    Args:
        programs: ids.
        with_failures: as for :func:`~mtmc_lsp.training.labels.grade_of`; false also leaves out groups without times.
    """
    featurizer, experience = Featurizer(), ExperienceCounter()
    groups: list[Group] = []
    for program in sorted(programs):
        for device in tree.devices_of(program) or [""]:
            for version in tree.by_program.get(program, ()):
                for group in _of_version(tree, version, device, featurizer, experience):
                    if with_failures or group.has_stop:
                        groups.append(_graded(tree, group, device, with_failures=with_failures))
    return [group for group in groups if len(set(group.labels)) > 1], experience


@dataclass(frozen=True)
class _Ungraded:
    """A group before its choices have grades."""

    version: Version
    rows: tuple[array[float], ...]
    items: tuple[Transition, ...]
    weight: float
    has_stop: bool


def _graded(tree: MeasuredTree, group: _Ungraded, device: str, *, with_failures: bool) -> Group:
    def reached(item: Transition) -> float:
        return (item.ratio or 1.0) * tree.best_from(item.result, device) if tree.is_base(item) else 1.0

    labels = [grade_of(item, with_failures=with_failures, reached=reached(item)) for item in group.items]
    ranks = [item.rank if item.rank >= 0 else len(group.items) for item in group.items]
    if group.has_stop:
        labels.append(STOP)
        ranks.append(max(ranks, default=0) + 1)
    version = group.version
    return Group(version.program, version.id, group.rows, tuple(labels), tuple(ranks), group.weight, group.has_stop)


def _of_version(
    tree: MeasuredTree, version: Version, device: str, featurizer: Featurizer, experience: ExperienceCounter
) -> Iterator[_Ungraded]:
    tried = [item for item in tree.of_version(version.id) if item.device in ("", device) and is_choice(item)]
    is_timed = any(item.ratio is not None for item in tried)
    if is_timed:
        # A correct version without a time may be faster or slower: it has no grade among timed ones.
        tried = [item for item in tried if item.ratio is not None or item.outcome in FAILURES]
    path = tree.path_of(version, device)
    failed = [item for item in tried if item.outcome is not Outcome.FASTER]
    counts = [count for count in FAILED_BEFORE if count <= len(failed)] if is_timed else [0]
    for count in counts:
        before = {id(item) for item in failed[:count]}
        items = [item for item in tried if id(item) not in before]
        if not items:
            continue
        state = tree.state(version, [*path, *failed[:count]], device)
        # The order of the file must not matter to ties between equal scores.
        items.sort(key=lambda item: (item.rank < 0, item.rank, item.key))
        rows = featurizer.rows(state, [Ranked(action_of(item), item.rank) for item in items])
        if count == 0 and is_timed:
            _count_experience(experience, items, rows)
        kept = rows if is_timed else rows[:-1]
        weight = 1.0 / len(counts) if is_timed else UNTIMED_WEIGHT
        yield _Ungraded(version, tuple(array("d", row) for row in kept), tuple(items), weight, is_timed)


def _count_experience(
    experience: ExperienceCounter, items: Sequence[Transition], rows: Sequence[Sequence[float]]
) -> None:
    for item, row in zip(items, rows, strict=False):
        features = dict(zip(FEATURES, row, strict=True))
        experience.add(experience_key(action_of(item).kind, features), gained=item.outcome is Outcome.FASTER)
