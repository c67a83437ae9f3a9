"""Conditions on the numbers of the iterations of a nest, which hold for some cells of the table and not for others.

The body runs once for each combination of answers (a *path*). A cell gets the values of the path whose answers are right for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from mtmc_lsp.capture.worker.loops.iteration import ON_TENSORS, Changing, NotKept, Numbering, Span, Step, known

MOST_PATHS = 12
"""Runs of the body with different answers."""


@dataclass(frozen=True)
class Condition:
    """A comparison of a number with another one."""

    compare: Callable[[Any, Any], Any]
    number: Changing
    other: Any

    def mask(self, numbering: Numbering) -> torch.Tensor:
        """Whether it holds, as a scalar tensor."""
        other = self.other.at(numbering) if isinstance(self.other, Changing) else self.other
        result: torch.Tensor = ON_TENSORS[self.compare](self.number.at(numbering), other)
        return result

    def same(self, other: Condition) -> bool:
        """Whether it is the same comparison."""
        return self.compare is other.compare and _same(self.number, other.number) and _same(self.other, other.other)

    def at(self, span: Span, iteration: Any) -> bool | None:
        """The answer in an iteration of one of the loops, if it depends on nothing else."""
        if not isinstance(self.number, Step) or self.number.span != span or isinstance(self.other, Changing):
            return None
        value = self.number.first + self.number.step * iteration
        holds, fails = self.compare(value, self.other), not_(self.compare, value, self.other)
        return True if known(holds) else False if known(fails) else None


def not_(compare: Callable[[Any, Any], Any], value: Any, other: Any) -> Any:
    """The opposite of a comparison."""
    return {
        "eq": lambda: value != other,
        "ne": lambda: value == other,
        "lt": lambda: value >= other,
        "le": lambda: value > other,
        "gt": lambda: value <= other,
        "ge": lambda: value < other,
    }[compare.__name__]()


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Step):
        return isinstance(other, Step) and one.span == other.span and one.same(other)
    if isinstance(one, Changing) or isinstance(other, Changing):
        return one is other
    return bool(type(one) is type(other) and known(one == other))


@dataclass
class Path:
    """The answers of one run of the body."""

    answers: list[tuple[Condition, bool]] = field(default_factory=list)
    planned: list[bool] = field(default_factory=list)
    """The answers with which the run begins; all later ones are true."""

    def answer(self, condition: Condition) -> bool:
        """The answer to a condition. Equal conditions get the same answer."""
        for earlier, answer in self.answers:
            if earlier.same(condition):
                return answer
        number = len(self.answers)
        answer = self.planned[number] if number < len(self.planned) else True
        self.answers.append((condition, answer))
        return answer

    def following(self) -> Path | None:
        """The next path; ``None`` after the last one."""
        answers = [answer for _, answer in self.answers]
        while answers and not answers[-1]:
            answers.pop()
        return Path(planned=[*answers[:-1], False]) if answers else None

    def excludes(self, span: Span, iteration: Any) -> bool:
        """Whether no cell of an iteration takes this path."""
        return any(condition.at(span, iteration) is (not answer) for condition, answer in self.answers)

    def mask(self, numbering: Numbering) -> torch.Tensor | None:
        """The cells that take this path; ``None`` if all do."""
        result = None
        for condition, answer in self.answers:
            mask = condition.mask(numbering)
            mask = mask if answer else ~mask
            result = mask if result is None else result & mask
        return result


def refuse_many(number: int) -> None:
    """Refuse a body that has too many paths."""
    if number > MOST_PATHS:
        raise NotKept("its body has too many cases that depend on the numbers of the iterations")
