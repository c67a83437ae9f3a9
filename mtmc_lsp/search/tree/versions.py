"""The tree of the versions of a run. It follows from the steps alone, so a resumed run has the same tree."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from mtmc_lsp.core.run import Candidate, Step, StepStatus

FASTER_BRANCH = "another branch is faster: "
PREDICTED_BRANCH = "another branch is predicted to be faster: "
"""Begins the reason of an alternative; the second if nothing is timed."""
BASE_WITHDRAWN = "the version that it changes was withdrawn: "
"""Begins the reason of a step that was faster than a version which turned out to be wrong or slow."""


@dataclass(eq=False)
class Version:
    """A node of the tree: the user's code, or a version that a step kept."""

    candidate: Candidate
    step: Step | None
    """The step that wrote it; None for the user's code."""
    parent: Version | None
    gain: float
    """Logarithm of its speedup over the user's code; a prediction if nothing is timed."""
    trials: list[Step] = field(default_factory=list)
    """What was tried on it, in order."""
    children: list[Version] = field(default_factory=list)

    @property
    def path(self) -> list[Version]:
        """The versions from the user's code to this one."""
        return [*(self.parent.path if self.parent is not None else ()), self]

    def below(self) -> Iterator[Version]:
        """This version and all that were made from it."""
        yield self
        for child in self.children:
            yield from child.below()


Gain = Callable[[Step, Version], float]
"""The gain of the version of a step, which changed the given version."""


class Tree:
    """All versions of a run."""

    def __init__(self, root: Candidate, steps: Sequence[Step], gain: Gain) -> None:
        """Build the tree.

        Args:
            root: the user's code.
        """
        self.root = Version(root, None, None, 0.0)
        self.steps = steps
        self._by_id = {root.id: self.root}
        tried = {step.candidate.id for step in steps if step.candidate is not None}
        for step in steps:
            # The id of the user's code changes with the text around the target, see `in_current_text`.
            base = self._by_id.get(step.base) or (None if step.base in tried else self.root)
            if base is None:
                continue
            base.trials.append(step)
            if is_kept(step) and step.candidate is not None:
                version = Version(step.candidate, step, base, gain(step, base))
                base.children.append(version)
                self._by_id[step.candidate.id] = version

    @property
    def versions(self) -> list[Version]:
        """All versions other than the user's code, in the order of their steps."""
        return [version for version in self._by_id.values() if version.step is not None]

    def fastest(self, *, verified: bool) -> Version | None:
        """The version with the largest gain, the earliest of equals; None if there is none.

        Args:
            verified: whether only versions count that were verified.
        """
        versions = [v for v in self.versions if not verified or (v.step is not None and v.step.verdict is not None)]
        return max(versions, key=lambda version: version.gain, default=None)

    def history(self, version: Version) -> tuple[Step, ...]:
        """What a planner may learn from: the path to a version, what failed on the path before, and what was tried on it."""
        path = {item.step.index for item in version.path if item.step is not None}
        last = max(path, default=0)
        bases = {step.index for item in version.path for step in item.trials}
        own = {step.index for step in version.trials}
        chosen = []
        for step in self.steps:
            if step.index in path:
                chosen.append(plain(step))
            elif step.index in own:
                chosen.append(as_alternative(plain(step)) if is_kept(step) else step)
            elif step.index in bases and step.index < last and not is_kept(step):
                chosen.append(step)
        return tuple(chosen)

    def arranged(self) -> list[Step]:
        """The steps, with those accepted that lead to the fastest verified version; the others are alternatives."""
        fastest = self.fastest(verified=True)
        path = {item.step.index for item in fastest.path if item.step is not None} if fastest is not None else set()
        known = {version.step.index for version in self.versions if version.step is not None}
        steps = []
        for step in self.steps:
            if not is_kept(step):
                steps.append(step)
            elif step.index in path:
                steps.append(plain(step))
            else:
                steps.append(as_alternative(plain(step), "" if step.index in known else BASE_WITHDRAWN))
        return steps


def is_kept(step: Step) -> bool:
    """Whether the step's version is faster than the one that it changed, and not known to be wrong."""
    return step.status is StepStatus.ACCEPTED or step.is_alternative


def plain(step: Step) -> Step:
    """A kept step as it was judged, without regard to other branches."""
    if not step.is_alternative:
        return step
    reason = step.reason
    for why in (FASTER_BRANCH, PREDICTED_BRANCH, BASE_WITHDRAWN):
        reason = reason.removeprefix(why)
    return replace(step, status=StepStatus.ACCEPTED, is_alternative=False, reason=reason)


def as_alternative(step: Step, why: str = "") -> Step:
    """An accepted step as one of a branch that is not delivered."""
    why = why or (FASTER_BRANCH if step.timing is not None else PREDICTED_BRANCH)
    return replace(step, status=StepStatus.REJECTED, is_alternative=True, reason=f"{why}{step.reason}")


def timed_gain(step: Step, base: Version) -> float:
    """The gain of the base and the step's measured ratio to it.

    The ratios of the path are multiplied, since each was measured in pairs with the version before: in eager mode, short calls
    vary by more than a step gains.
    """
    timing = step.timing
    ratio = (timing.against("previous") or timing.against("eager")) if timing is not None else None
    return base.gain + (math.log(ratio.ratio) if ratio is not None and ratio.ratio > 0 else 0.0)
